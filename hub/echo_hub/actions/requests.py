"""The table of all operator actions, with their fields, bounds and effects.

Three thin interfaces use the table: the operator's page, the JSON API and `echo-hub act`. Each builds a request with
`request_of`. `echo_hub.oversight.operator_desk` carries it out.

Each class is one action. All three interfaces show its docstring as description. The fields have the order of the
command line. Settings have the same names as in the run's config.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from echo_hub.actions.records import Scope, TokenScope
from echo_shared.described import Described

NodeId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_.-]+$")]
Days = Annotated[float, Field(ge=0.01, le=3650)]


def _is_name(name: str) -> str:
    if not name.isprintable() or name != name.strip():
        raise ValueError("a name is one line without surrounding blanks")
    return name


PersonName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_is_name)]


class WrongRequestError(ValueError):
    """A request is invalid. The text tells its sender what is wrong."""


class Request(Described):
    """Base class of all actions."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    SCOPE: ClassVar[Scope] = "operate"
    """The scope that a token needs."""
    IN_BOOKS: ClassVar[bool] = False
    """True if the action is complete as soon as the request is stored. The hub notices the change within a second.

    All other actions wait until a hub serves the run; the hub may start later.
    """
    ASKS: ClassVar[bool] = False
    """True if the page asks for confirmation, because the action stops work, locks someone out or cannot be undone."""


class Pause(Request):
    """Stop leasing until `resume`. Leased work is still received, and the learner trains complete groups."""

    action: Literal["pause"] = "pause"
    ASKS = True


class Drain(Request):
    """Open no new groups until `resume`. Open groups are leased until complete, so that nothing is left half done."""

    action: Literal["drain"] = "drain"
    ASKS = True


class Resume(Request):
    """Resume leasing after `pause` or `drain`."""

    action: Literal["resume"] = "resume"


class SetMaxStaleness(Request):
    """Set the maximum age in steps of a rollout at training. Older rollouts are dropped at once as stale. Batches that
    are already complete keep their rollouts."""

    action: Literal["max_staleness"] = "max_staleness"
    value: Annotated[int, Field(ge=0, le=1000)]
    """Maximum age of a rollout at training, in steps."""


class SetPublishEvery(Request):
    """Set the number of steps from one published version to the next. Counting starts at the learner's next version,
    which is published."""

    action: Literal["publish_every"] = "publish_every"
    value: Annotated[int, Field(ge=1, le=1001)]
    """Number of steps from one published version to the next."""


class SetLearningRate(Request):
    """Set Adam's learning rate. The new rate holds from the next step that the learner has not begun."""

    action: Literal["learning_rate"] = "learning_rate"
    value: Annotated[float, Field(gt=0, le=1)]
    """Adam's learning rate, as in training.learning_rate."""


class SetObjective(Request):
    """Change the objective. The change holds from the next step that the learner has not begun. It is refused as a
    whole if it contradicts the objective, other settings or the reward scale."""

    action: Literal["objective"] = "objective"
    value: Annotated[str, Field(min_length=3, max_length=1000)]
    """NAME=VALUE from the section [objective]; separate several of them by blanks."""


class SetSpendCap(Request):
    """Limit the hourly cost of all working nodes together. Under a lower cap, the more expensive nodes stand by at
    once."""

    action: Literal["spend_cap_per_hour"] = "spend_cap_per_hour"
    value: Annotated[float, Field(ge=0, le=1e9)]
    """US dollars per hour; 0 = only free nodes work."""


class PublishNow(Request):
    """Publish the learner's next version (the first one not begun), even before its time. The steps until the following
    publication are counted from there."""

    action: Literal["publish"] = "publish"


class EvaluateNow(Request):
    """Evaluate a version once on the held-out problems."""

    action: Literal["evaluate"] = "evaluate"
    version: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """A published version, 0 for the base model; default: the newest."""


class Export(Request):
    """Copy a published version to RUN/exports, from where `PeftModel.from_pretrained` can load it."""

    action: Literal["export"] = "export"
    version: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """The published version to copy; default: the newest."""


class Ban(Request):
    """Disconnect a node, refuse it from now on, and change the run key, so that it cannot read later publications."""

    action: Literal["ban"] = "ban"
    IN_BOOKS = True
    ASKS = True
    node: NodeId
    """Id of the node, as printed by `echo-hub nodes`."""


class Unban(Request):
    """Let a banned node take part again."""

    action: Literal["unban"] = "unban"
    IN_BOOKS = True
    ASKS = True
    node: NodeId
    """Id of the node, as printed by `echo-hub nodes`."""


class Pardon(Request):
    """Let a quarantined node start over: everything it sends is checked before it is trained on."""

    action: Literal["pardon"] = "pardon"
    IN_BOOKS = True
    ASKS = True
    node: NodeId
    """Id of the node, as printed by `echo-hub nodes`."""


class TrustNode(Request):
    """Treat a node as proven, for example a node of your own: its rollouts do not wait for checks, and few are checked.
    Failed checks count as for any node. If the node's engine changes, it must prove itself again."""

    action: Literal["trust"] = "trust"
    ASKS = True
    node: NodeId
    """Id of the node, as printed by `echo-hub nodes`."""


class DistrustNode(Request):
    """Make a node prove itself again: everything it sends is checked before it is trained on."""

    action: Literal["distrust"] = "distrust"
    node: NodeId
    """Id of the node, as printed by `echo-hub nodes`."""


class MakeInvite(Request):
    """Invite a person: create a token, shown once, that lets a few nodes join. Nodes that have joined may always
    reconnect."""

    action: Literal["invite"] = "invite"
    SCOPE = "admin"
    IN_BOOKS = True
    name: PersonName
    """Name of the invited person."""
    keys: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Number of nodes that may join with the invite. Each node has its own key."""
    days: Days = 30.0
    """Days until new nodes can no longer join with the invite."""


class RevokeInvite(Request):
    """Revoke a person's invite: no node can join with it any more."""

    action: Literal["uninvite"] = "uninvite"
    SCOPE = "admin"
    IN_BOOKS = True
    ASKS = True
    name: PersonName
    """Name of the invited person."""
    ban: bool = False
    """Also ban all nodes that joined with the invite."""


class MakeToken(Request):
    """Create an API token, shown once."""

    action: Literal["token"] = "token"
    SCOPE = "admin"
    IN_BOOKS = True
    name: PersonName
    """The token's name, shown in the action log. With the scope use, it is the tenant's name: a later token of the same
    name gives access to the same models."""
    scope: TokenScope = "read"
    """read: every page and figure. operate: also control of the run and its nodes. admin: everything. use: only the
    Tinker and OpenAI interfaces, for sampling and for training own models; prompts may go to strangers' machines."""
    days: Days = 90.0
    """Days until the token expires."""


class RevokeToken(Request):
    """Revoke an API token at once."""

    action: Literal["revoke_token"] = "revoke_token"
    SCOPE = "admin"
    IN_BOOKS = True
    ASKS = True
    name: PersonName
    """Name of the API token."""


class SetTenantQuota(Request):
    """Set the number of tokens that one tenant may use in a day."""

    action: Literal["tenant_quota"] = "tenant_quota"
    IN_BOOKS = True
    tenant: PersonName
    """Name of the tenant, which is also the name of its token."""
    tokens_per_day: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Tokens a day (UTC): prompts, drawn and trained tokens; 0 = no limit. Default: the setting
    tenants.tokens_per_day."""


class BlockTenant(Request):
    """Refuse all requests of a tenant at once, until `unblock_tenant`. Its saved weights stay."""

    action: Literal["block_tenant"] = "block_tenant"
    IN_BOOKS = True
    ASKS = True
    tenant: PersonName
    """Name of the tenant, which is also the name of its token."""


class UnblockTenant(Request):
    """Admit a blocked tenant again."""

    action: Literal["unblock_tenant"] = "unblock_tenant"
    IN_BOOKS = True
    tenant: PersonName
    """Name of the tenant, which is also the name of its token."""


class RotateRunKey(Request):
    """Create a new run key for later publications, and send it to the connected nodes."""

    action: Literal["rotate_run_key"] = "rotate_run_key"
    SCOPE = "admin"
    ASKS = True


class RotateOperatorToken(Request):
    """Replace the token in RUN/operator.token: the old one stops working, and all sessions end."""

    action: Literal["rotate_operator_token"] = "rotate_operator_token"
    SCOPE = "admin"
    ASKS = True


AnyRequest = (
    Pause
    | Drain
    | Resume
    | SetMaxStaleness
    | SetPublishEvery
    | SetLearningRate
    | SetObjective
    | SetSpendCap
    | PublishNow
    | EvaluateNow
    | Export
    | Ban
    | Unban
    | Pardon
    | TrustNode
    | DistrustNode
    | MakeInvite
    | RevokeInvite
    | MakeToken
    | RevokeToken
    | SetTenantQuota
    | BlockTenant
    | UnblockTenant
    | RotateRunKey
    | RotateOperatorToken
)
TABLE: Final[Mapping[str, type[AnyRequest]]] = {
    kind.model_fields["action"].default: kind for kind in AnyRequest.__args__
}
_ADAPTER: Final[TypeAdapter[AnyRequest]] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="action")])


def request_of(action: str, fields: Mapping[str, Any], *, strict: bool = False) -> AnyRequest:
    """Build a request from its fields. Raises WrongRequestError if they are invalid.

    If `strict` is False, text is converted to numbers, because forms and command lines contain only text.
    """
    if action not in TABLE:
        raise WrongRequestError(f"There is no action {action[:40]!r}. There are: {', '.join(TABLE)}.")
    if fields.get("action", action) != action:
        raise WrongRequestError("The action in the request differs from the one in its URL.")
    try:
        return _ADAPTER.validate_python({**fields, "action": action}, strict=strict)
    except ValidationError as error:
        raise WrongRequestError("; ".join(_words(action, one) for one in error.errors(include_url=False))) from None


def _words(action: str, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != action) or action
    return f"{where[:80]}: {error['msg']}"


def summary(kind: type[Request]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _set_again(action: str, before: Any) -> AnyRequest | None:
    """Return a request that sets the value `before` again. Return None if the request does not allow that value.

    Such a value may come from config.toml or from another version of the software.
    """
    try:
        return None if before is None else request_of(action, {"value": before})
    except WrongRequestError:
        return None


def undo_of(request: AnyRequest, before: Any) -> AnyRequest | None:
    """Return the request that undoes a finished `request`, or None if no request can undo it. `before` is the value
    that `request` replaced."""
    match request:
        case Pause() | Drain() | Resume():
            states: dict[str, AnyRequest] = {"open": Resume(), "paused": Pause(), "draining": Drain()}
            return states.get(str(before))
        case SetMaxStaleness() | SetPublishEvery() | SetLearningRate() | SetObjective() | SetSpendCap():
            return _set_again(request.action, before)
        case Ban():
            return Unban(node=request.node)
        case Unban():
            return Ban(node=request.node)
        case TrustNode():
            return DistrustNode(node=request.node)
        case DistrustNode() if before == "proven":
            return TrustNode(node=request.node)
        case MakeInvite():
            return RevokeInvite(name=request.name)
        case MakeToken():
            return RevokeToken(name=request.name)
        case SetTenantQuota():
            return SetTenantQuota(tenant=request.tenant, tokens_per_day=before)
        case BlockTenant():
            return UnblockTenant(tenant=request.tenant)
        case UnblockTenant():
            return BlockTenant(tenant=request.tenant)
        case _:
            return None


def taking_back(action: str, fields: Mapping[str, Any], before: Any) -> AnyRequest | None:
    """Return the request that undoes a logged action.

    Return None if nothing can undo the action, or if `TABLE` lacks it: `echo-hub archive`, or an action of another
    software version.
    """
    try:
        return undo_of(request_of(action, fields), before)
    except WrongRequestError:
        return None
