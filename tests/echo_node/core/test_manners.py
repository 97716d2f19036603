import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from echo_node.core.manners import CALM_S, Hold, HoldReason, Manners, MannersConfig, OwnerPause, SensorReading
from echo_node.core.traffic import Amount, Traffic
from echo_shared.errors import ConfigError

NOON = datetime(2026, 11, 2, 12, 0, tzinfo=UTC)  # A Monday.
QUIET = SensorReading(
    idle_s=math.inf,
    on_battery=False,
    battery_share=1.0,
    full_screen=False,
    others_cpu=0.0,
    others_gpu=0.0,
    cpu_celsius=50.0,
    gpu_celsius=50.0,
    gpu_watts=20.0,
    free_memory_bytes=2**34,
    free_disk_bytes=2**36,
    metered=False,
)


class Owner:
    """A machine's manners (the rules by which its node yields to the owner), with a scripted clock."""

    def __init__(self, **settings: object) -> None:
        self.manners = Manners(MannersConfig(**settings))  # type: ignore[arg-type]
        self.now = 0.0

    def holds(
        self, reading: SensorReading, *, pause: OwnerPause | None = None, on_gpu: bool = True, after_s: float = 1.0
    ) -> tuple[Hold, ...]:
        self.now += after_s
        return self.manners.holds(reading, pause=pause, on_gpu=on_gpu, now=self.now, local=NOON)

    def reasons(self, reading: SensorReading, *, on_gpu: bool = True, after_s: float = 1.0) -> list[str]:
        return [hold.reason.value for hold in self.holds(reading, on_gpu=on_gpu, after_s=after_s)]


def test_a_quiet_machine_and_one_without_readings_are_not_held() -> None:
    assert Owner().holds(QUIET) == () and Owner().holds(SensorReading()) == ()


@pytest.mark.parametrize(
    ("settings", "reading", "reason", "says"),
    [
        ({}, {"on_battery": True, "battery_share": 0.4}, "on_battery", "40% left"),
        ({}, {"idle_s": 3.0}, "owner_active", "the GPU is yours until you have been away for 3 minutes"),
        ({"idle_after_s": 60}, {"idle_s": 59.0}, "owner_active", "1 minutes"),
        ({"exclusive": ["blender"]}, {"programs": frozenset({"blender"})}, "application", "blender runs."),
        ({}, {"full_screen": True}, "full_screen", "fills the screen"),
        ({}, {"others_gpu": 0.6}, "others_gpu", "use 60% of the GPU; the node works only up to 25%"),
        ({"others_cpu": 0.5}, {"others_cpu": 0.75}, "others_cpu", "use 75% of the processor"),
        ({}, {"cpu_celsius": 96.0}, "cpu_hot", "96 °C warm; the limit is 95 °C"),
        ({}, {"gpu_celsius": 88.0}, "gpu_hot", "The GPU is 88 °C"),
        ({"max_gpu_watts": 200}, {"gpu_watts": 250.0}, "gpu_power", "draws 250 W; the limit is 200 W"),
        ({}, {"free_memory_bytes": 10**8}, "memory", "0.10 GB of memory are free"),
        ({}, {"free_disk_bytes": 0}, "disk", "0.00 GB of the disk are free"),
        ({}, {"metered": True}, "metered", "metered"),
        ({"schedule": ["22:00-07:00"]}, {}, "schedule", "the next ones begin mon 22:00"),
    ],
)
def test_each_wish_holds_the_node_and_gives_the_reason(
    settings: dict[str, object], reading: dict[str, object], reason: str, says: str
) -> None:
    (hold,) = Owner(**settings).holds(replace(QUIET, **reading))  # type: ignore[arg-type]
    assert hold.reason.value == reason and says in hold.sentence
    assert hold.frees_memory == (reason in ("application", "full_screen", "others_gpu", "memory"))


@pytest.mark.parametrize(
    ("settings", "reading"),
    [
        ({"on_battery": True}, {"on_battery": True}),
        ({"gpu": "always"}, {"idle_s": 0.0}),
        ({}, {"idle_s": 180.0}),
        ({"full_screen": True}, {"full_screen": True}),
        ({"others_gpu": 1}, {"others_gpu": 1.0}),
        ({}, {"others_cpu": 1.0}),
        ({"max_cpu_celsius": 0, "max_gpu_celsius": 0}, {"cpu_celsius": 120.0, "gpu_celsius": 120.0}),
        ({"min_free_memory_bytes": 0, "min_free_disk_bytes": 0}, {"free_memory_bytes": 0, "free_disk_bytes": 0}),
        ({"metered": True}, {"metered": True}),
        ({"schedule": ["mon"]}, {}),
    ],
)
def test_each_wish_can_be_waived(settings: dict[str, object], reading: dict[str, object]) -> None:
    assert Owner(**settings).holds(replace(QUIET, **reading)) == ()  # type: ignore[arg-type]


def test_gpu_readings_do_not_hold_an_engine_on_the_processor() -> None:
    busy = replace(QUIET, others_gpu=1.0, gpu_celsius=120.0, idle_s=0.0)
    assert Owner().reasons(busy, on_gpu=False) == []
    assert Owner(cpu="idle").reasons(busy, on_gpu=False) == ["owner_active"]


def test_a_hold_ends_after_a_while_well_within_the_limit() -> None:
    owner = Owner()
    assert owner.reasons(replace(QUIET, gpu_celsius=88.0)) == ["gpu_hot"]
    for _ in range(20):
        assert owner.reasons(replace(QUIET, gpu_celsius=80.0)) == ["gpu_hot"], "not cool yet"
    assert owner.reasons(replace(QUIET, gpu_celsius=78.0), after_s=CALM_S - 1) == ["gpu_hot"]
    assert owner.reasons(replace(QUIET, gpu_celsius=88.0)) == ["gpu_hot"], "the wait starts again"
    assert owner.reasons(replace(QUIET, gpu_celsius=78.0), after_s=CALM_S - 1) == ["gpu_hot"]
    assert owner.reasons(replace(QUIET, gpu_celsius=78.0)) == []
    assert owner.reasons(replace(QUIET, gpu_celsius=80.0)) == [], "below the limit"


def test_an_engine_stopped_for_memory_returns_once_memory_suffices() -> None:
    owner, tight = Owner(), replace(QUIET, free_memory_bytes=2**28)
    assert owner.reasons(tight) == ["memory"]
    without_it = replace(QUIET, free_memory_bytes=2**30, engine_bytes=2**30)
    assert owner.reasons(without_it, after_s=2 * CALM_S) == ["memory"]
    roomy = replace(QUIET, free_memory_bytes=2**31, engine_bytes=2**30)
    assert owner.reasons(roomy, after_s=2 * CALM_S) == []


def test_a_pause_lasts_its_given_time() -> None:
    owner = Owner()
    (hold,) = owner.holds(QUIET, pause=OwnerPause())
    assert (hold.reason, hold.frees_memory) == (HoldReason.PAUSED, False) and "echo-node resume" in hold.sentence
    (hold,) = owner.holds(QUIET, pause=OwnerPause(until=NOON.timestamp() + 5_400))
    assert "until Mon 13:30" in hold.sentence
    assert owner.holds(QUIET, pause=OwnerPause(until=NOON.timestamp())) == ()


def test_all_reasons_are_told_the_owner_s_own_first() -> None:
    everything = SensorReading(on_battery=True, full_screen=True, free_disk_bytes=0)
    holds = Owner(schedule=["sun"]).holds(everything, pause=OwnerPause())
    assert [hold.reason.value for hold in holds] == ["paused", "schedule", "on_battery", "full_screen", "disk"]


def test_other_settings_hold_at_once() -> None:
    owner = Owner()
    assert owner.reasons(replace(QUIET, on_battery=True)) == ["on_battery"]
    owner.manners.settings = MannersConfig(on_battery=True, schedule=("sun",))
    assert owner.reasons(replace(QUIET, on_battery=True)) == ["schedule"]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a valid time span of a week"):
        MannersConfig(schedule=("someday",))
    for wrong in ({"others_gpu": 1.5}, {"cpu_share": 0}, {"gpu": "sometimes"}, {"idle_after_s": math.nan}, {"x": 1}):
        with pytest.raises(ValidationError):
            MannersConfig(**wrong)  # type: ignore[arg-type]


def test_a_traffic_cap_holds_the_node_and_disconnects_it() -> None:
    owner = Owner(max_upload_bytes_day=1_000_000_000)
    used = Traffic(day=Amount(sent=999_999_999), month=Amount(sent=5 * 10**9))
    assert owner.holds(replace(QUIET, traffic=used)) == ()
    (hold,) = owner.holds(replace(QUIET, traffic=replace(used, day=Amount(sent=10**9))))
    assert (hold.reason, hold.keeps_offline, hold.frees_memory) == (HoldReason.TRAFFIC, True, False)
    assert hold.sentence == "1.00 GB were uploaded this day, of 1.00 that you have set: the node resumes at midnight."
    (metered,) = owner.holds(replace(QUIET, metered=True))
    assert metered.keeps_offline
    (battery,) = owner.holds(replace(QUIET, on_battery=True))
    assert not battery.keeps_offline
