from __future__ import annotations

from typing import Any

import pytest

from echo_hub.actions.records import SCOPES
from echo_hub.actions.requests import (
    TABLE,
    Ban,
    BlockTenant,
    MakeInvite,
    Pause,
    PublishNow,
    Resume,
    RevokeInvite,
    SetMaxStaleness,
    SetTenantQuota,
    Unban,
    UnblockTenant,
    WrongRequestError,
    request_of,
    summary,
    taking_back,
    undo_of,
)

GIVEN: dict[str, dict[str, Any]] = {
    "max_staleness": {"value": 3},
    "publish_every": {"value": 3},
    "learning_rate": {"value": 1e-4},
    "objective": {"value": "clip_high=0.3 kl_coefficient=0.01"},
    "spend_cap_per_hour": {"value": 2},
    **{name: {"node": "a" * 20} for name in ("ban", "unban", "pardon", "trust", "distrust")},
    **{name: {"tenant": "Ada"} for name in ("tenant_quota", "block_tenant", "unblock_tenant")},
    **{name: {"name": "Ada"} for name in ("invite", "uninvite", "token", "revoke_token")},
}


@pytest.mark.parametrize("action", TABLE)
def test_every_action_is_built_by_name_and_described(action: str) -> None:
    request = request_of(action, GIVEN.get(action, {}), strict=True)
    assert type(request) is TABLE[action] and request.action == action
    assert request.SCOPE in SCOPES and summary(type(request)).endswith(".")
    assert request_of(action, request.model_dump(mode="json")) == request, "as the store keeps it"
    assert type(request).model_fields.keys() - type(request).descriptions().keys() <= {"action"}, "not explained"


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("explode", {}),
        ("max_staleness", {}),
        ("max_staleness", {"value": -1}),
        ("max_staleness", {"value": 1001}),
        ("max_staleness", {"value": 2.5}),
        ("max_staleness", {"value": float("nan")}),
        ("max_staleness", {"value": 10**400}),
        ("learning_rate", {"value": float("inf")}),
        ("learning_rate", {"value": 0}),
        ("learning_rate", {"value": 10**400}),
        ("spend_cap_per_hour", {"value": None}),
        ("pause", {"value": 1}),
        ("pause", {"action": "drain"}),
        ("ban", {"node": "a\x00b"}),
        ("ban", {"node": "../../etc"}),
        ("ban", {"node": "a" * 65}),
        ("ban", {"node": ["a"]}),
        ("invite", {"name": " Ada"}),
        ("invite", {"name": "A\nda"}),
        ("invite", {"name": "\x1b[2J"}),
        ("token", {"name": "x", "scope": "root"}),
        ("tenant_quota", {"tenant": "Ada", "tokens_per_day": -1}),
        ("tenant_quota", {"tenant": "Ada", "tokens_per_day": 1.5}),
        ("block_tenant", {"tenant": ""}),
        ("evaluate", {"version": -1}),
        ("export", {"version": 0}),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_impossible_request_is_refused_with_a_text(action: str, fields: dict[str, Any], strict: bool) -> None:
    with pytest.raises(WrongRequestError) as refused:
        request_of(action, fields, strict=strict)
    assert 0 < len(str(refused.value)) < 600


def test_forms_and_command_lines_give_texts_and_scripts_do_not() -> None:
    assert request_of("max_staleness", {"value": "4"}) == SetMaxStaleness(value=4)
    for text in ("4", True, 4.0001):
        with pytest.raises(WrongRequestError):
            request_of("max_staleness", {"value": text}, strict=True)


def test_an_undoable_action_names_its_inverse() -> None:
    assert undo_of(Pause(), "open") == Resume() and undo_of(Resume(), "paused") == Pause()
    assert undo_of(SetMaxStaleness(value=3), 2) == SetMaxStaleness(value=2)
    assert undo_of(Ban(node="a"), False) == Unban(node="a")
    assert undo_of(MakeInvite(name="Ada"), None) == RevokeInvite(name="Ada")
    assert undo_of(BlockTenant(tenant="Ada"), False) == UnblockTenant(tenant="Ada")
    assert undo_of(UnblockTenant(tenant="Ada"), True) == BlockTenant(tenant="Ada")
    assert undo_of(SetTenantQuota(tenant="Ada", tokens_per_day=5), None) == SetTenantQuota(tenant="Ada")
    assert undo_of(SetTenantQuota(tenant="Ada"), 7) == SetTenantQuota(tenant="Ada", tokens_per_day=7)
    assert undo_of(SetMaxStaleness(value=3), -1) is None, "a bound of -1 cannot be requested"
    assert undo_of(PublishNow(), None) is None and undo_of(SetMaxStaleness(value=3), None) is None


def test_logged_actions_without_a_request_are_not_undone() -> None:
    assert taking_back("pause", {}, "open") == Resume()
    assert taking_back("archive", {"steps": "1 to 9", "file": "f"}, None) is None
    assert taking_back("pause", {"unknown": 1}, "open") is None
