from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tenants.quotas import DAY_S, MAX_SESSIONS, SESSION_S, Quotas, TenantLimits
from echo_hub.tenants.refusal import Refusal, RefusalKind

NOON = 20_000 * DAY_S + DAY_S / 2


def kind_of(quotas: Quotas, tenant_id: str, now: float = NOON) -> RefusalKind | None:
    try:
        quotas.check(tenant_id, now=now)
    except Refusal as refusal:
        assert refusal.retry_after_s is not None and refusal.retry_after_s > 0
        return refusal.kind
    return None


def test_a_spent_quota_holds_until_midnight_and_for_one_tenant() -> None:
    quotas = Quotas(TenantLimits(tokens_per_day=100))
    quotas.check("Ada", now=NOON)
    quotas.begin("Ada", "r1", 10)
    quotas.end("r1", 100, now=NOON)
    assert quotas.used("Ada", now=NOON) == 100 and kind_of(quotas, "Ada") is RefusalKind.QUOTA_SPENT
    assert kind_of(quotas, "Bob") is None
    with pytest.raises(Refusal) as refused:
        quotas.check("Ada", now=NOON)
    assert refused.value.retry_after_s == DAY_S / 2 and "100 used, 0 in open requests, of 100" in str(refused.value)
    tomorrow = NOON + DAY_S / 2
    assert kind_of(quotas, "Ada", tomorrow) is None and quotas.used("Ada", now=tomorrow) == 0


def test_prompts_of_open_requests_count_before_they_end() -> None:
    quotas = Quotas(TenantLimits(tokens_per_day=100))
    quotas.begin("Ada", "r1", 60)
    quotas.begin("Ada", "r1", 60)
    assert kind_of(quotas, "Ada") is None
    quotas.begin("Ada", "r2", 40)
    with pytest.raises(Refusal, match="open requests need the rest") as refused:
        quotas.check("Ada", now=NOON)
    assert refused.value.kind is RefusalKind.QUOTA_SPENT and refused.value.got == "0 used, 100 in open requests, of 100"
    quotas.end("r2", 0, now=NOON)
    assert kind_of(quotas, "Ada") is None, "a cancelled request costs nothing"


def test_an_ended_request_counts_once() -> None:
    quotas = Quotas(TenantLimits(tokens_per_day=100))
    quotas.begin("Ada", "r1", 10)
    for _ in range(3):
        quotas.end("r1", 70, now=NOON)
    quotas.end("unknown", 70, now=NOON)
    assert quotas.used("Ada", now=NOON) == 70 and quotas.num_open("Ada") == 0


def test_the_days_tokens_survive_a_restart_but_not_midnight() -> None:
    quotas = Quotas(TenantLimits(tokens_per_day=100))
    quotas.restore({"Ada": 100}, now=NOON)
    assert kind_of(quotas, "Ada") is RefusalKind.QUOTA_SPENT and kind_of(quotas, "Bob") is None
    assert kind_of(quotas, "Ada", NOON + DAY_S) is None


@pytest.mark.parametrize("jump", [DAY_S, 365 * DAY_S, -DAY_S, -365 * DAY_S])
def test_a_clock_that_jumps_and_returns_gives_no_second_quota(jump: float) -> None:
    quotas = Quotas(TenantLimits(tokens_per_day=100))
    for request_id, now in (("r1", NOON), ("r2", NOON + jump)):
        quotas.begin("Ada", request_id, 10)
        quotas.end(request_id, 100, now=now)
    assert kind_of(quotas, "Ada", NOON) is kind_of(quotas, "Ada", NOON + jump) is RefusalKind.QUOTA_SPENT
    for day in range(100):
        quotas.begin("Ada", f"later{day}", 0)
        quotas.end(f"later{day}", 1, now=NOON + 400 * DAY_S + day * DAY_S)
    assert quotas.used("Ada", now=NOON) == 0, "old days are forgotten"


def test_a_full_queue_is_refused_until_a_request_ends() -> None:
    quotas = Quotas(TenantLimits(max_queued=2))
    quotas.begin("Ada", "r1", 1)
    quotas.begin("Ada", "r2", 1)
    assert kind_of(quotas, "Ada") is RefusalKind.TOO_MANY and kind_of(quotas, "Bob") is None
    quotas.end("r1", 1, now=NOON)
    assert kind_of(quotas, "Ada") is None


def test_an_operator_changes_the_limits_of_one_tenant() -> None:
    quotas = Quotas(TenantLimits(tokens_per_day=10))
    quotas.restore({"Ada": 50, "Bob": 50}, now=NOON)
    quotas.change({"Ada": TenantLimits(tokens_per_day=100)})
    assert kind_of(quotas, "Ada") is None and kind_of(quotas, "Bob") is RefusalKind.QUOTA_SPENT
    quotas.change({"Ada": TenantLimits(tokens_per_day=0)})
    assert kind_of(quotas, "Ada") is None, "0 is no limit"
    quotas.change({})
    assert kind_of(quotas, "Ada") is RefusalKind.QUOTA_SPENT


def test_sessions_models_and_bytes_are_limited() -> None:
    quotas = Quotas(TenantLimits(max_models=2, max_checkpoint_bytes=100))
    quotas.check_session("Ada", MAX_SESSIONS - 1, elapsed=0.0)
    quotas.check_model("Ada", 1)
    quotas.check_bytes("Ada", 60, 40)
    for check, arguments, kind in (
        (partial(quotas.check_session, elapsed=0.0), (MAX_SESSIONS,), RefusalKind.TOO_MANY),
        (quotas.check_model, (2,), RefusalKind.FORBIDDEN),
        (quotas.check_bytes, (60, 41), RefusalKind.FORBIDDEN),
    ):
        with pytest.raises(Refusal) as refused:
            check("Ada", *arguments)
        assert refused.value.kind is kind and refused.value.do
    Quotas(TenantLimits()).check_bytes("Ada", 10**15)


def test_sessions_cannot_be_opened_without_end() -> None:
    """The rows of an ended session stay for a day, so the number of sessions per day must be limited."""
    quotas, opened = Quotas(TenantLimits()), 0
    for _ in range(3 * MAX_SESSIONS):
        try:
            quotas.check_session("Ada", 0, elapsed=10.0)
            opened += 1
        except Refusal as refusal:
            assert refusal.kind is RefusalKind.TOO_MANY and refusal.retry_after_s == SESSION_S
    assert opened == MAX_SESSIONS
    quotas.check_session("Bob", 0, elapsed=10.0)
    quotas.check_session("Ada", 0, elapsed=10.0 + SESSION_S)
    with pytest.raises(Refusal, match="too fast"):
        quotas.check_session("Ada", 0, elapsed=10.0 + SESSION_S)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 50), st.booleans()), max_size=60))
def test_counts_never_drift(steps: list[tuple[str, int, int, bool]]) -> None:
    """Requests begin and end in any order, with repetitions. The counts must always equal those of the open
    requests."""
    quotas, open_ones, used = Quotas(TenantLimits()), dict[str, str](), {"a": 0, "b": 0}
    for tenant, number, tokens, begins in steps:
        request_id = f"{tenant}{number}"
        if begins:
            quotas.begin(tenant, request_id, tokens)
            open_ones.setdefault(request_id, tenant)
        else:
            quotas.end(request_id, tokens, now=NOON)
            used[tenant] += tokens if open_ones.pop(request_id, None) else 0
        for one in "ab":
            assert quotas.num_open(one) == sum(owner == one for owner in open_ones.values())
            assert quotas.used(one, now=NOON) == used[one]
