"""The one table of what an operator may do: each action with its fields, their bounds, and what it does.

Three thin doors lead here: the operator's page, the JSON API and `echo-hub act`. Each makes one of these of what it is
given, by `request_of`, and hands it on; `echo_hub.oversight.operator_desk` carries it out.

A class is an action. Its docstring is what the doors say of it, its fields are what it is given, in the order of a
command line. Names of settings are those of the run's config.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from echo_hub.actions.records import Scope

NodeId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Za-z_.-]+$")]
Days = Annotated[float, Field(ge=0.01, le=3650)]


def _is_name(name: str) -> str:
    if not name.isprintable() or name != name.strip():
        raise ValueError("a name is one line, without blanks around it")
    return name


PersonName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_is_name)]


class WrongRequestError(ValueError):
    """What in a request cannot be, in words for whoever sent it."""


class Request(BaseModel):
    """What all actions have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    SCOPE: ClassVar[Scope] = "operate"
    """What a token has to be good for."""
    IN_BOOKS: ClassVar[bool] = False
    """It is done as soon as it is in the books, by whoever puts it there; the hub notices within a second. All others
    are done by the hub that serves the run, or the next one that does."""
    ASKS: ClassVar[bool] = False
    """The page asks before it does this, for it stops work, locks somebody out or cannot be undone."""


class Pause(Request):
    """Lease nothing until `resume`: what is leased comes in, and the learner trains what is complete."""

    action: Literal["pause"] = "pause"
    ASKS = True


class Drain(Request):
    """Open no new group until `resume`: what is open is leased until it is complete, so that nothing is left half
    done."""

    action: Literal["drain"] = "drain"
    ASKS = True


class Resume(Request):
    """Lease again, after `pause` or `drain`."""

    action: Literal["resume"] = "resume"


class SetMaxStaleness(Request):
    """How many steps old a rollout may be when it is trained on. What is older is dropped at once, as stale; batches
    that are written keep what they have."""

    action: Literal["max_staleness"] = "max_staleness"
    value: Annotated[int, Field(ge=0, le=1000)]
    """Steps."""


class SetPublishEvery(Request):
    """Steps between published versions, from the next version on that the learner has not begun, which is published."""

    action: Literal["publish_every"] = "publish_every"
    value: Annotated[int, Field(ge=1, le=1001)]
    """Steps."""


class SetLearningRate(Request):
    """Adam's learning rate, from the next step on that the learner has not begun."""

    action: Literal["learning_rate"] = "learning_rate"
    value: Annotated[float, Field(gt=0, le=1)]
    """As training.learning_rate."""


class SetObjective(Request):
    """What a step minimises, from the next step on that the learner has not begun. What fits neither the objective nor
    the other settings is refused as a whole, and so is what would change what a reward comes to."""

    action: Literal["objective"] = "objective"
    value: Annotated[str, Field(min_length=3, max_length=1000)]
    """NAME=VALUE of the section [objective]; several with blanks between them."""


class SetSpendCap(Request):
    """What all working nodes together may cost in an hour. Beneath a lower cap those that cost more stand by at
    once."""

    action: Literal["spend_cap_per_hour"] = "spend_cap_per_hour"
    value: Annotated[float, Field(ge=0, le=1e9)]
    """US dollars; 0 = gifts alone work."""


class PublishNow(Request):
    """Publish the next version that the learner has not begun, whether it is due or not; then on at the interval that
    holds."""

    action: Literal["publish"] = "publish"


class EvaluateNow(Request):
    """Measure a version on the held-out problems, once."""

    action: Literal["evaluate"] = "evaluate"
    version: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """A published version, 0 = the base; left out: the newest."""


class Export(Request):
    """Copy a published version into RUN/exports, for `PeftModel.from_pretrained` to load."""

    action: Literal["export"] = "export"
    version: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Left out: the newest."""


class Ban(Request):
    """Disconnect a node, refuse it from now on, and give the run a new key, so that it can read nothing more."""

    action: Literal["ban"] = "ban"
    IN_BOOKS = True
    ASKS = True
    node: NodeId
    """As `echo-hub nodes` prints it."""


class Unban(Request):
    """Let a banned node take part again."""

    action: Literal["unban"] = "unban"
    IN_BOOKS = True
    ASKS = True
    node: NodeId
    """As `echo-hub nodes` prints it."""


class Pardon(Request):
    """Let a quarantined node begin anew: all that it sends is checked again, before anybody trains on it."""

    action: Literal["pardon"] = "pardon"
    IN_BOOKS = True
    ASKS = True
    node: NodeId
    """As `echo-hub nodes` prints it."""


class TrustNode(Request):
    """Take a node for one that has long proven itself, as you may one of your own: its rollouts need not wait for their
    checks, and few are checked. What is found then counts as it does of any other; with another engine it has to prove
    itself like others."""

    action: Literal["trust"] = "trust"
    ASKS = True
    node: NodeId
    """As `echo-hub nodes` prints it."""


class DistrustNode(Request):
    """Have a node prove itself anew: all that it sends is checked, before anybody trains on it."""

    action: Literal["distrust"] = "distrust"
    node: NodeId
    """As `echo-hub nodes` prints it."""


class MakeInvite(Request):
    """Invite a person: a token, shown once, that lets a few nodes join. Those that have come may always come back."""

    action: Literal["invite"] = "invite"
    SCOPE = "admin"
    IN_BOOKS = True
    name: PersonName
    """Whom it is for."""
    keys: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Nodes that may come by it, each with its key."""
    days: Days = 30.0
    """New nodes may come by it for so long."""


class RevokeInvite(Request):
    """Revoke a person's invite: no node joins by it any more."""

    action: Literal["uninvite"] = "uninvite"
    SCOPE = "admin"
    IN_BOOKS = True
    ASKS = True
    name: PersonName
    """Whom it was for."""
    ban: bool = False
    """Ban all nodes that came by it, too."""


class MakeToken(Request):
    """Make a token for a script, shown once."""

    action: Literal["token"] = "token"
    SCOPE = "admin"
    IN_BOOKS = True
    name: PersonName
    """Whose it is; the log of actions names it."""
    scope: Scope = "read"
    """read: every page and figure; operate: what concerns the run and its nodes, too; admin: everything."""
    days: Days = 90.0
    """It is good for so long."""


class RevokeToken(Request):
    """Revoke a script's token, at once."""

    action: Literal["revoke_token"] = "revoke_token"
    SCOPE = "admin"
    IN_BOOKS = True
    ASKS = True
    name: PersonName
    """Whose it is."""


class RotateRunKey(Request):
    """Seal what is published from now on with a new key, which the nodes that are connected are sent."""

    action: Literal["rotate_run_key"] = "rotate_run_key"
    SCOPE = "admin"
    ASKS = True


class RotateOperatorToken(Request):
    """Put a new token into RUN/operator.token: the old one lets nobody in any more, and all sessions end."""

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
    | RotateRunKey
    | RotateOperatorToken
)
TABLE: Final[Mapping[str, type[AnyRequest]]] = {
    kind.model_fields["action"].default: kind for kind in AnyRequest.__args__
}
"""All actions, by name."""
_ADAPTER: Final[TypeAdapter[AnyRequest]] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="action")])


def request_of(action: str, fields: Mapping[str, Any], *, strict: bool = False) -> AnyRequest:
    """Raises WrongRequestError. Unless `strict`, texts are taken for the numbers that they are, as forms and command
    lines have them."""
    if action not in TABLE:
        raise WrongRequestError(f"There is no action {action[:40]!r}. There are: {', '.join(TABLE)}.")
    if fields.get("action", action) != action:
        raise WrongRequestError("The request names another action than its address.")
    try:
        return _ADAPTER.validate_python({**fields, "action": action}, strict=strict)
    except ValidationError as error:
        raise WrongRequestError("; ".join(_words(action, one) for one in error.errors(include_url=False))) from None


def _words(action: str, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != action) or action
    return f"{where[:80]}: {error['msg']}"


def summary(kind: type[Request]) -> str:
    """What it does, in one line."""
    return " ".join((kind.__doc__ or "").split())


def _set_again(action: str, before: Any) -> AnyRequest | None:
    """None where nobody may ask for what was: what a file sets, or another version of this software, has other bounds
    than a request."""
    try:
        return None if before is None else request_of(action, {"value": before})
    except WrongRequestError:
        return None


def undo_of(request: AnyRequest, before: Any) -> AnyRequest | None:
    """What takes this back, once it is done; `before`: what was, by the books. None: nothing does."""
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
        case _:
            return None


def taking_back(action: str, fields: Mapping[str, Any], before: Any) -> AnyRequest | None:
    """`undo_of` an action as the log has it. None, too, of one that is not in `TABLE`: `echo-hub archive`, or an action
    of another version of this software."""
    try:
        return undo_of(request_of(action, fields), before)
    except WrongRequestError:
        return None
