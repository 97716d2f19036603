import pytest
from pydantic import ValidationError

from echo_node.core.shares import HALF_LIFE_S, HubShare, next_hub

HOUR = 3_600.0


def test_the_hub_furthest_below_its_share_is_next() -> None:
    hubs = {"a": HubShare(share=2, worked_s=40, at=0), "b": HubShare(share=1, worked_s=15, at=0), "c": HubShare()}
    assert next_hub(hubs, away=set(), now=0.0) == "b"
    assert next_hub(hubs, away={"b"}, now=0.0) == "a"
    assert next_hub(hubs, away={"a", "b"}, now=0.0) is None, "a share of 0 is never next"
    assert next_hub({}, away=set(), now=0.0) is None


def test_time_is_had_as_the_shares_are() -> None:
    hubs, had, now = {"a": HubShare(share=3), "b": HubShare(share=1)}, {"a": 0, "b": 0}, 0.0
    for _ in range(200):
        hub = next_hub(hubs, away=set(), now=now)
        assert hub is not None
        now += HOUR
        had[hub] += 1
        hubs[hub] = hubs[hub].worked(HOUR, now)
    assert had["a"] == pytest.approx(150, abs=3)


def test_old_work_counts_less() -> None:
    one = HubShare(share=1, worked_s=100, at=1_000.0)
    assert one.counted_s(1_000.0) == 100 and one.counted_s(1_000.0 + HALF_LIFE_S) == pytest.approx(50)
    assert one.counted_s(0.0) == 100, "a clock that was set back"
    later = one.worked(30, 1_000.0 + HALF_LIFE_S)
    assert (later.worked_s, later.at, later.share) == (pytest.approx(80), 1_000.0 + HALF_LIFE_S, 1)


@pytest.mark.parametrize(
    "wrong", [{"share": -1}, {"share": float("inf")}, {"worked_s": -1}, {"worked_s": float("nan")}]
)
def test_shares_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        HubShare(**wrong)
