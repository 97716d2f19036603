"""Operators' actions in the store: log all actions, and carry out those that change only the database.

Each action is inserted once and gets one outcome. If an action changes only the database, the inserting transaction
also carries it out, in the hub or in a command's process. Any other action needs the running hub: it is inserted with
the outcome "wanted", and the hub records its final outcome in the same transaction as its effects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from echo_hub.actions.records import ActionOutcome, ActionRecord, Actor, ApiToken
from echo_hub.actions.requests import (
    AnyRequest,
    Ban,
    BlockTenant,
    MakeInvite,
    MakeToken,
    Pardon,
    RevokeInvite,
    RevokeToken,
    SetTenantQuota,
    Unban,
    UnblockTenant,
)
from echo_hub.core.accounting.effects import ActionSettled, SettingRecorded
from echo_hub.store import invites, standings
from echo_hub.store.known_nodes import ban_nodes, unban_nodes
from echo_hub.store.tables import actions, api_tokens, live_settings, nodes, run_meta, trust
from echo_hub.store.tenant_overview import OwnLimits, has_been_tenant, read_tenant_limits, set_tenant_limits
from echo_shared.records.run import Invite

DAY_S: Final = 86_400.0
_CONFIGURED: Final = "configured_settings"
TOGETHER: Final = (frozenset({"max_staleness", "publish_every"}),)
"""Sets of settings that only make sense together. If config.toml overrules an operator's change to one setting of a
set, it overrules the changes to all settings of the set.
"""


class ActionRefusedError(Exception):
    """An action is refused; the text tells the operator why."""


def note_action(
    connection: Connection,
    request: AnyRequest,
    by: Actor,
    now: float,
    *,
    secret_hash: str = "",
    undoes: int | None = None,
) -> ActionRecord:
    """Insert an action into the log. If it changes only the database, carry it out too. Refused actions are logged too.

    `secret_hash` is the hash of the API token or invite that the action makes.
    """
    number = connection.scalar(
        insert(actions)
        .returning(actions.c.number)
        .values(
            asked_at=now,
            via=by.via,
            who=by.who[:128],
            action=request.action,
            request=request.model_dump(mode="json", exclude={"action"}),
            undoes=undoes,
            outcome=ActionOutcome.WANTED,
            detail="",
        )
    )
    assert number is not None
    if request.IN_BOOKS:
        try:
            settled = _done(connection, number, request, secret_hash, now)
        except ActionRefusedError as error:
            settled = ActionSettled(number=number, done=False, detail=str(error))
        settle(connection, [settled], now)
    return _find(connection, number)


def settle_action(connection: Connection, settled: ActionSettled, now: float) -> None:
    """Record the outcome of an action that the hub carried out without the coordinator (the state machine that decides
    on leases, steps and versions).
    """
    settle(connection, [settled], now)


def find_action(connection: Connection, number: int) -> ActionRecord | None:
    row = connection.execute(select(actions).where(actions.c.number == number)).first()
    return None if row is None else _record(row)


def read_wanted_actions(connection: Connection) -> list[ActionRecord]:
    """Return the actions that the hub still has to carry out, oldest first."""
    of_them = select(actions).where(actions.c.outcome == ActionOutcome.WANTED).order_by(actions.c.number)
    return [_record(row) for row in connection.execute(of_them)]


def read_action_log(connection: Connection, *, limit: int, before: int | None = None) -> list[ActionRecord]:
    found = select(actions).order_by(actions.c.number.desc()).limit(limit)
    if before is not None:
        found = found.where(actions.c.number < before)
    return [_record(row) for row in connection.execute(found)]


def was_undone(connection: Connection, number: int) -> bool:
    """Return True if another action that undoes this action is done or pending."""
    of_it = (actions.c.undoes == number, actions.c.outcome != ActionOutcome.REFUSED)
    return connection.execute(select(actions.c.number).where(*of_it)).first() is not None


def read_api_tokens(connection: Connection) -> list[ApiToken]:
    """Return all API tokens that were ever made, oldest first."""
    rows = connection.execute(select(api_tokens).order_by(api_tokens.c.token_id))
    return [ApiToken(**row) for row in rows.mappings()]


def read_num_api_tokens(connection: Connection) -> tuple[int, int]:
    """Return how many API tokens were made and how many were revoked. Every change of tokens changes one of these
    numbers, so caches compare them.
    """
    counts = select(func.count(), func.count(api_tokens.c.revoked_at)).select_from(api_tokens)
    made, revoked = connection.execute(counts).one()
    return made, revoked


def begin_settings(connection: Connection, configured: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the settings that operators have changed and that still apply, and the names of the changes that
    config.toml overrules.

    Called when the hub starts. config.toml overrules an operator's change if the value in config.toml differs from its
    value at the last start.
    """
    before = connection.scalar(select(run_meta.c.value).where(run_meta.c.key == _CONFIGURED))
    was = configured if before is None else json.loads(before)
    changed = {name for name, value in configured.items() if name in was and was[name] != value}
    for names in TOGETHER:
        changed |= names if names & changed else set()
    overruled = changed & read_settings(connection).keys()
    connection.execute(delete(live_settings).where(live_settings.c.name.in_(overruled)))
    connection.execute(delete(run_meta).where(run_meta.c.key == _CONFIGURED))
    connection.execute(insert(run_meta), {"key": _CONFIGURED, "value": json.dumps(dict(configured))})
    return read_settings(connection), overruled


def _record(row: Row[Any]) -> ActionRecord:
    return ActionRecord(**{**row._mapping, "outcome": ActionOutcome(row.outcome)})


def _find(connection: Connection, number: int) -> ActionRecord:
    return _record(connection.execute(select(actions).where(actions.c.number == number)).one())


def _done(connection: Connection, number: int, request: AnyRequest, secret_hash: str, now: float) -> ActionSettled:
    """Carry out an action that changes only the database. Raises ActionRefusedError."""
    match request:
        case Ban(node=node) | Unban(node=node):
            return _ban(connection, number, node, banned=isinstance(request, Ban), now=now)
        case Pardon(node=node):
            return _pardon(connection, number, node, now)
        case MakeInvite():
            return _invite(connection, number, request, secret_hash, now)
        case RevokeInvite():
            return _uninvite(connection, number, request, now)
        case MakeToken():
            return _make_token(connection, number, request, secret_hash, now)
        case RevokeToken(name=name):
            return _revoke_token(connection, number, name, now)
        case SetTenantQuota() | BlockTenant() | UnblockTenant():
            return _limit_tenant(connection, number, request, now)
        case _:
            raise ActionRefusedError(f"{request.action} needs the running hub: it changes more than the database.")


def _ban(connection: Connection, number: int, node: str, *, banned: bool, now: float) -> ActionSettled:
    known = connection.execute(select(nodes.c.banned_at).where(nodes.c.node_id == node)).first()
    if known is None:
        raise ActionRefusedError("No node of this id has ever joined this run.")
    was = known.banned_at is not None
    if was == banned:
        raise ActionRefusedError("This node is already banned." if was else "This node is not banned.")
    if banned:
        ban_nodes(connection, [node], now)
    else:
        unban_nodes(connection, [node])
    return ActionSettled(number=number, done=True, before=was, after=banned)


def _pardon(connection: Connection, number: int, node: str, now: float) -> ActionSettled:
    state = connection.scalar(select(trust.c.state).where(trust.c.node_id == node))
    if state != "quarantined":
        raise ActionRefusedError("This node is not in quarantine.")
    standings.want_pardon(connection, [node], now)
    return ActionSettled(number=number, done=True, before=state, after="new")


def _invite(connection: Connection, number: int, request: MakeInvite, secret_hash: str, now: float) -> ActionSettled:
    made = Invite(
        name=request.name,
        token_hash=secret_hash,
        max_keys=request.keys,
        created_at=now,
        expires_at=now + request.days * DAY_S,
    )
    if not invites.add_invite(connection, made):
        raise ActionRefusedError("A valid invite of this name already exists.")
    return ActionSettled(number=number, done=True)


def _uninvite(connection: Connection, number: int, request: RevokeInvite, now: float) -> ActionSettled:
    of_name = [one for one in invites.read_invites(connection) if one.name == request.name]
    if not of_name:
        raise ActionRefusedError("There is no invite of this name.")
    came = invites.revoke_invite(connection, request.name, now, ban=request.ban)
    what = f"{len(came)} nodes joined with it"
    banned = f" and are banned: {', '.join(came)}" if request.ban and came else ""
    return ActionSettled(number=number, done=True, detail=f"{what}{banned}.")


def _make_token(connection: Connection, number: int, request: MakeToken, secret_hash: str, now: float) -> ActionSettled:
    of_name = (api_tokens.c.name == request.name, api_tokens.c.revoked_at.is_(None), api_tokens.c.expires_at > now)
    if connection.execute(select(api_tokens.c.token_id).where(*of_name)).first() is not None:
        raise ActionRefusedError("A valid token of this name already exists.")
    connection.execute(
        insert(api_tokens).values(
            name=request.name,
            scope=request.scope,
            token_hash=secret_hash,
            created_at=now,
            expires_at=now + request.days * DAY_S,
        )
    )
    return ActionSettled(number=number, done=True)


def _revoke_token(connection: Connection, number: int, name: str, now: float) -> ActionSettled:
    of_name = (api_tokens.c.name == name, api_tokens.c.revoked_at.is_(None))
    if connection.execute(update(api_tokens).where(*of_name).values(revoked_at=now)).rowcount == 0:
        raise ActionRefusedError("There is no valid token of this name.")
    return ActionSettled(number=number, done=True)


def _limit_tenant(
    connection: Connection, number: int, request: SetTenantQuota | BlockTenant | UnblockTenant, now: float
) -> ActionSettled:
    limits = read_tenant_limits(connection).get(request.tenant, OwnLimits())
    if isinstance(request, SetTenantQuota):
        if not has_been_tenant(connection, request.tenant):
            raise ActionRefusedError("There was never a token of this name with the scope use.")
        set_tenant_limits(connection, request.tenant, replace(limits, tokens_per_day=request.tokens_per_day))
        return ActionSettled(number=number, done=True, before=limits.tokens_per_day, after=request.tokens_per_day)
    was, blocks = limits.blocked_at is not None, isinstance(request, BlockTenant)
    if not was and not has_been_tenant(connection, request.tenant):
        raise ActionRefusedError("There was never a token of this name with the scope use.")
    if was == blocks:
        raise ActionRefusedError("This tenant is already blocked." if was else "This tenant is not blocked.")
    set_tenant_limits(connection, request.tenant, replace(limits, blocked_at=now if blocks else None))
    return ActionSettled(number=number, done=True, before=was, after=blocks)


def settle(connection: Connection, records: Sequence[ActionSettled], now: float) -> None:
    """Record outcomes of actions. An outcome that is already recorded stays: after a crash, the hub may carry out the
    same action a second time.
    """
    for record in records:
        of_it = (actions.c.number == record.number, actions.c.outcome == "wanted")
        connection.execute(
            update(actions)
            .where(*of_it)
            .values(
                outcome="done" if record.done else "refused",
                settled_at=now,
                before=record.before,
                after=record.after,
                detail=record.detail,
            )
        )


def note_settings(connection: Connection, records: Sequence[SettingRecorded]) -> None:
    """Store the newest value of each setting. No upsert is needed: only one thread of the hub inserts such rows."""
    for name, stored in {record.setting: record.stored for record in records}.items():
        of_name = live_settings.c.name == str(name)
        if connection.execute(update(live_settings).where(of_name).values(value=stored)).rowcount == 0:
            connection.execute(insert(live_settings), {"name": str(name), "value": stored})


def read_settings(connection: Connection) -> dict[str, Any]:
    """Return the settings that operators have changed, by name."""
    return {row.name: row.value for row in connection.execute(select(live_settings))}
