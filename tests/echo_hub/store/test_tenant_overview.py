"""What operators see of tenants and decide about them, in a real database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_hub.actions.records import ActionOutcome, Actor
from echo_hub.actions.requests import AnyRequest, BlockTenant, MakeToken, RevokeToken, SetTenantQuota, UnblockTenant
from echo_hub.store.actions import DAY_S, note_action
from echo_hub.store.store import Store
from echo_hub.store.tenant_overview import (
    OwnLimits,
    has_been_tenant,
    read_failed_requests,
    read_tenant_limits,
    read_tenants,
)
from echo_hub.store.tenant_records import (
    DONE,
    FAILED,
    CheckpointRow,
    ModelRow,
    RequestEnded,
    RequestRow,
    SessionRow,
    TenantRecord,
    TenantSessionEnded,
    TenantTallied,
    write_tenant_records,
)
from echo_shared.records.tenant import TenantTotals

BY = Actor(via="cli", who="ada")
TODAY, NOW = 20_000, 20_000 * DAY_S + 60.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path / 'echo.db'}")


def act(store: Store, request: AnyRequest, *, now: float = NOW, secret: str = "") -> tuple[ActionOutcome, str]:
    record = store.write(note_action, request, BY, now, secret_hash=secret)
    return record.outcome, record.detail


def made(store: Store, *names: str) -> None:
    for name in names:
        assert act(store, MakeToken(name=name, scope="use", days=10), secret=name * 8)[0] is ActionOutcome.DONE


def seen(store: Store, *, tokens_per_day: int = 0) -> dict[str, TenantTotals]:
    found = store.read(read_tenants, day=TODAY, now=NOW, tokens_per_day=tokens_per_day)
    return {one.tenant_id: one for one in found}


def session(tenant: str, number: int) -> list[TenantRecord]:
    ids: dict[str, Any] = {"tenant_id": tenant, "session_id": f"s{number}"}
    model_id = f"s{number}:train:0"
    lora: dict[str, Any] = {
        "base_model": "base",
        "lora": {},
        "user_metadata": {},
        "made_at": NOW,
        "last_request_at": NOW,
    }
    return [
        SessionRow(**ids, about={}, made_at=NOW),
        ModelRow(**ids, model_id=model_id, **lora),
        *(
            RequestRow(**ids, request_id=f"{tenant}{n}", owner_id=model_id, seq_id=n, kind="pass", made_at=NOW)
            for n in range(3)
        ),
        CheckpointRow(
            path=f"tinker://{model_id}/weights/a",
            tenant_id=tenant,
            model_id=model_id,
            kind="weights",
            made_at=NOW,
            size_bytes=500,
            directory="d",
        ),
    ]


def test_each_tenants_use_is_counted_for_itself(store: Store) -> None:
    made(store, "Ada", "Bob")
    store.write(write_tenant_records, [*session("Ada", 1), *session("Gone", 2)])
    ended = RequestEnded(request_id="Ada0", state=DONE, outcome=b"o", ended_at=NOW, end_number=1)
    store.write(
        write_tenant_records,
        [
            ended,
            TenantSessionEnded(session_id="s2", ended_at=NOW),
            TenantTallied(tenant_id="Ada", day=TODAY, requests=2, prompt_tokens=10, drawn_tokens=5, trained_tokens=1),
            TenantTallied(tenant_id="Ada", day=TODAY - 29, drawn_tokens=100),
            TenantTallied(tenant_id="Ada", day=TODAY - 30, drawn_tokens=1_000),
            TenantTallied(tenant_id="Gone", day=TODAY - 1, drawn_tokens=7),
        ],
    )
    found = seen(store, tokens_per_day=50)
    assert list(found) == ["Ada", "Bob", "Gone"]
    ada, bob, gone = found.values()
    assert (ada.sessions, ada.models, ada.queued, ada.requests_today, ada.saved_bytes) == (1, 1, 2, 2, 500)
    assert (ada.tokens_today, ada.recent_tokens, ada.tokens_per_day) == (16, 116, 50)
    assert ada.token_expires_at == NOW + 10 * DAY_S and not ada.has_own_quota
    assert (bob.sessions, bob.queued, bob.tokens_today, bob.saved_bytes) == (0, 0, 0, 0)
    assert (gone.sessions, gone.models, gone.queued, gone.token_expires_at) == (0, 0, 0, None)
    assert (gone.tokens_today, gone.recent_tokens) == (0, 7)


def test_a_revoked_token_is_none(store: Store) -> None:
    made(store, "Ada")
    act(store, RevokeToken(name="Ada"))
    assert seen(store)["Ada"].token_expires_at is None and store.read(has_been_tenant, "Ada")
    made(store, "Ada2")
    assert act(store, MakeToken(name="Ops", scope="admin"), secret="x")[0] is ActionOutcome.DONE
    assert "Ops" not in seen(store) and not store.read(has_been_tenant, "Ops")


def test_an_operator_sets_quotas_and_blocks(store: Store) -> None:
    made(store, "Ada")
    assert act(store, SetTenantQuota(tenant="Eve", tokens_per_day=5))[0] is ActionOutcome.REFUSED
    assert act(store, BlockTenant(tenant="Eve"))[0] is ActionOutcome.REFUSED
    assert act(store, UnblockTenant(tenant="Ada")) == (ActionOutcome.REFUSED, "This tenant is not blocked.")
    assert act(store, SetTenantQuota(tenant="Ada", tokens_per_day=5))[0] is ActionOutcome.DONE
    assert act(store, BlockTenant(tenant="Ada"))[0] is ActionOutcome.DONE
    assert act(store, BlockTenant(tenant="Ada"))[0] is ActionOutcome.REFUSED
    assert store.read(read_tenant_limits) == {"Ada": OwnLimits(tokens_per_day=5, blocked_at=NOW)}
    ada = seen(store, tokens_per_day=50)["Ada"]
    assert (ada.tokens_per_day, ada.has_own_quota, ada.blocked_at) == (5, True, NOW)
    record = store.write(note_action, SetTenantQuota(tenant="Ada", tokens_per_day=0), BY, NOW)
    assert (record.before, record.after) == (5, 0)
    assert seen(store, tokens_per_day=50)["Ada"].tokens_per_day == 0, "0 is no limit, whatever the run's setting"
    act(store, SetTenantQuota(tenant="Ada"))
    act(store, UnblockTenant(tenant="Ada"))
    assert store.read(read_tenant_limits) == {} and seen(store, tokens_per_day=50)["Ada"].tokens_per_day == 50


def test_the_newest_failures_come_first(store: Store) -> None:
    store.write(write_tenant_records, session("Ada", 1))
    ends = [
        RequestEnded(request_id=f"Ada{n}", state=state, outcome=b"o", ended_at=NOW + n, end_number=n)
        for n, state in enumerate((FAILED, DONE, FAILED))
    ]
    store.write(write_tenant_records, ends)
    rows = store.read(read_failed_requests, since=NOW - 1, limit=5)
    assert [(row.request_id, row.tenant_id, row.kind) for row in rows] == [
        ("Ada2", "Ada", "pass"),
        ("Ada0", "Ada", "pass"),
    ]
    assert [row.request_id for row in store.read(read_failed_requests, since=NOW, limit=5)] == ["Ada2"]
