"""The log of operators' actions in a real store, to which both an operator's command and the hub write."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.actions.records import ActionOutcome, Actor
from echo_hub.actions.requests import (
    AnyRequest,
    Ban,
    MakeInvite,
    MakeToken,
    Pardon,
    Pause,
    RevokeInvite,
    RevokeToken,
    SetMaxStaleness,
    Unban,
)
from echo_hub.core.accounting.effects import ActionSettled, SettingRecorded, StandingRecorded
from echo_hub.core.trust.standing import StandingRow, StandingState
from echo_hub.store.actions import (
    DAY_S,
    begin_settings,
    find_action,
    note_action,
    read_action_log,
    read_api_tokens,
    read_num_api_tokens,
    read_settings,
    read_wanted_actions,
    was_undone,
)
from echo_hub.store.invites import read_invites
from echo_hub.store.known_nodes import read_banned_nodes
from echo_hub.store.standings import read_wanted_pardons
from echo_hub.store.store import Store

BY = Actor(via="cli", who="ada")
CONFIGURED = {"max_staleness": 2, "publish_every": 1, "learning_rate": 1e-3, "spend_cap_per_hour": 0.0}


@pytest.fixture
def opened(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path / 'echo.db'}")


@pytest.fixture
def books(opened: Store) -> Store:
    for name in ("a", "b"):
        opened.node_seen(node_id=name, public_key=bytes(32), name=name, backend="torch", device="cpu", now=1.0)
    return opened


def outcome(books: Store, request: AnyRequest, now: float = 10.0, **more: str) -> tuple[ActionOutcome, str]:
    record = books.write(note_action, request, BY, now, **more)
    return record.outcome, record.detail


def test_an_action_is_pending_until_the_hub_settles_it_once(books: Store, opened: Store) -> None:
    first, second = (
        books.write(note_action, Pause(), BY, 10.0),
        books.write(note_action, SetMaxStaleness(value=4), BY, 11.0),
    )
    assert [record.number for record in books.read(read_wanted_actions)] == [first.number, second.number]
    assert (first.outcome, first.who, first.via, second.request) == (ActionOutcome.WANTED, "ada", "cli", {"value": 4})
    settled = ActionSettled(number=second.number, done=True, before=2, after=4)
    opened.apply([SettingRecorded(setting="max_staleness", stored=4), settled], 12.0)
    opened.apply([ActionSettled(number=second.number, done=False, detail="too late")], 13.0)
    found = books.read(find_action, second.number)
    assert found is not None and (found.outcome, found.before, found.after) == (ActionOutcome.DONE, 2, 4)
    assert (found.settled_at, found.detail) == (12.0, "") and books.read(read_settings) == {"max_staleness": 4}
    assert [record.number for record in books.read(read_wanted_actions)] == [first.number]
    assert [record.number for record in books.read(read_action_log, limit=1)] == [second.number]
    assert [record.number for record in books.read(read_action_log, limit=5, before=second.number)] == [first.number]
    assert books.read(find_action, 99) is None


def test_bans_and_unbans_are_logged_with_the_value_before(books: Store, opened: Store) -> None:
    assert outcome(books, Ban(node="a")) == (ActionOutcome.DONE, "")
    assert opened.read(read_banned_nodes) == {"a"}
    assert outcome(books, Ban(node="a")) == (ActionOutcome.REFUSED, "This node is already banned.")
    undone = books.write(note_action, Unban(node="a"), BY, 12.0, undoes=1)
    assert (undone.before, undone.after, opened.read(read_banned_nodes)) == (True, False, frozenset())
    assert books.read(was_undone, 1) and not books.read(was_undone, 2)
    assert outcome(books, Unban(node="b")) == (ActionOutcome.REFUSED, "This node is not banned.")
    assert outcome(books, Ban(node="nobody"))[0] is ActionOutcome.REFUSED
    assert [record.outcome for record in books.read(read_action_log, limit=10)].count(ActionOutcome.REFUSED) == 3, (
        "refused actions are logged too"
    )


def test_only_a_node_in_quarantine_can_be_pardoned(books: Store, opened: Store) -> None:
    opened.apply([StandingRecorded(row=StandingRow(node_id="a", state=StandingState.QUARANTINED))], 1.0)
    assert outcome(books, Pardon(node="a"))[0] is ActionOutcome.DONE
    assert outcome(books, Pardon(node="b"))[0] is ActionOutcome.REFUSED
    assert opened.read(read_wanted_pardons) == {"a"}


def test_invites_and_tokens_keep_the_hash_alone_and_names_are_taken(books: Store, opened: Store) -> None:
    assert outcome(books, MakeInvite(name="Ada", keys=2, days=7), secret_hash="f" * 64)[0] is ActionOutcome.DONE
    (invite,) = opened.read(read_invites)
    assert (invite.token_hash, invite.max_keys, invite.expires_at) == ("f" * 64, 2, 10.0 + 7 * DAY_S)
    assert outcome(books, MakeInvite(name="Ada"), secret_hash="e" * 64)[0] is ActionOutcome.REFUSED
    assert outcome(books, RevokeInvite(name="Ada", ban=True))[0] is ActionOutcome.DONE
    assert outcome(books, RevokeInvite(name="Eve"))[0] is ActionOutcome.REFUSED
    assert outcome(books, MakeToken(name="ci", scope="operate", days=1), secret_hash="d" * 64)[0] is ActionOutcome.DONE
    assert outcome(books, MakeToken(name="ci"), secret_hash="c" * 64)[0] is ActionOutcome.REFUSED
    late = 10.0 + DAY_S
    assert outcome(books, MakeToken(name="ci"), now=late, secret_hash="b" * 64)[0] is ActionOutcome.DONE, (
        "the older token of that name has expired"
    )
    assert outcome(books, RevokeToken(name="ci"), now=late)[0] is ActionOutcome.DONE
    assert outcome(books, RevokeToken(name="ci"))[0] is ActionOutcome.REFUSED
    tokens = books.read(read_api_tokens)
    assert [(token.scope, token.holds(11.0)) for token in tokens] == [("operate", False), ("read", False)]
    assert books.read(read_num_api_tokens) == (2, 2)
    assert all("f" * 64 not in str(record) for record in books.read(read_action_log, limit=20))


def test_an_operators_setting_holds_until_the_configured_value_changes(books: Store, opened: Store) -> None:
    assert books.write(begin_settings, CONFIGURED) == ({}, set())
    stored = [("max_staleness", 4), ("publish_every", [[3, 2]]), ("leasing", "paused"), ("learning_rate", [[3, 0.1]])]
    opened.apply([SettingRecorded(setting=name, stored=value) for name, value in stored], 1.0)
    assert books.write(begin_settings, CONFIGURED) == (dict(stored), set())
    held, overruled = books.write(begin_settings, {**CONFIGURED, "publish_every": 3})
    assert overruled == {"max_staleness", "publish_every"}, (
        "settings of the learning rate and of publishing are overruled together"
    )
    assert held == {"leasing": "paused", "learning_rate": [[3, 0.1]]} == books.read(read_settings)
    assert books.write(begin_settings, {**CONFIGURED, "publish_every": 3}) == (held, set())
