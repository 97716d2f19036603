"""State of a node's sampling engines, one per device: permission to work, capacity and speed.

Without the setting `devices`, a node has one engine with the device name "". Each engine starts, dies, rests and yields
to the machine's owner independently. The node works while one engine can work.

All engines of a node draw with the same precision, because the hub judges all rollouts of a node by one numerics class
(backend, precision and kind of device). The first engine that is up decides; another one with a different precision
ends, and waits for changed settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from echo_node.core.effects import Effect, LimitDuty
from echo_node.core.engine_life import EngineLife
from echo_node.core.events import EngineReady, Holding
from echo_node.core.manners import Hold
from echo_node.core.pace import OwnPace
from echo_node.core.placing import Seats, rates
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.core.yielding import Yielding
from echo_shared.sampling.moving_on import MovingOn
from echo_shared.wire.messages import MAX_BATCHED, Lease

HoldBack = Literal[
    "the engine is not up",
    "the spool cannot be written",
    "the node is leaving",
    "groups keep failing",
    "the machine is its owner's",
]
"""Reason why the node asks the hub for no work."""
DeviceState = Literal["starting", "paused", "resting", "refused", "working"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """State of one device's engine, shown to the node's user."""

    device: str
    state: DeviceState
    holds: tuple[Hold, ...]
    """Reasons for which the engine pauses, including those for which the whole node pauses."""
    width: int
    """Maximum number of rollouts sampled at the same time; 0 = the engine is not up."""
    rollouts: int
    """Unfinished rollouts that the engine has."""
    tokens_per_s: float
    precision: str
    problem: str


class DeviceEngine:
    """State of one device's engine."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.life = EngineLife(device)
        self.yielding = Yielding(device)
        self.pace = OwnPace()
        self._moving_on = MovingOn()
        self.precision = ""
        self.scores = False
        """True if the engine can recompute completions of other nodes."""
        self.share = 1.0
        """Share of its device's time that the engine may use."""
        self._told_share = 1.0
        self.stops_by: float | None = None
        """Deadline for this engine's last tokens; then another engine continues its leases. None = no leases wait."""
        self.refusal: Trouble | None = None
        """Reason for which the engine must not run with the current settings; None = it may run."""

    @property
    def is_held(self) -> bool:
        """True while the engine pauses for the machine's owner."""
        return bool(self.yielding.holds)

    @property
    def listens(self) -> bool:
        """True if the engine is up and may get commands."""
        return self.life.is_up and not self.yielding.is_still

    @property
    def problem(self) -> Trouble | None:
        return self.refusal or self.life.problem

    def takes_work(self, now: float) -> bool:
        return self.listens and not self.is_held and not self.life.is_resting(now)

    def ready(self, event: EngineReady, now: float) -> None:
        self.life.ready(event, now)
        self._told_share = 1.0
        self.pace.tokens_per_s = event.tokens_per_s
        self.precision, self.scores = event.precision, event.scores

    def limited(self) -> list[Effect]:
        """Tell the engine the share of its device's time, if this share has changed."""
        if self.share == self._told_share:
            return []
        # Until the engine is measured at the smaller share, assume that its speed falls in proportion.
        self.pace.tokens_per_s *= min(1.0, self.share / self._told_share)
        self._told_share = self.share
        return [LimitDuty(share=self.share, device=self.device)]

    def window(self, capacity_factor: int) -> int:
        """Return the number of rollouts that the engine can hold and finish before their deadlines."""
        return self.pace.affordable(min(MAX_BATCHED, capacity_factor * self.life.width))

    def moves_on(self, behind: Sequence[tuple[Lease, tuple[int, ...]]], rollouts: int, now: float) -> bool:
        """Return True if the leases `behind` (see `Leases.behind`) should now continue with a newer version. If so,
        record the switch. `rollouts`: number of all rollouts that the engine has.
        """
        rate = self.pace.tokens_per_s
        token_s = min(self.life.width, rollouts) / rate if rate else 0.0
        longest = max(lease.max_tokens - count for lease, counts in behind for count in counts)
        if not self._moving_on.is_due(longest, token_s=token_s, now=now):
            return False
        read = sum(len(lease.prompt_ids) + count for lease, counts in behind for count in counts)
        self._moving_on.moved(read, tokens_per_s=rate, now=now)
        return True

    def work(self, rollouts: int, now: float) -> DeviceWork:
        """Return the state of the engine, which has `rollouts` unfinished rollouts."""
        state: DeviceState = "working"
        if self.refusal is not None:
            state = "refused"
        elif self.is_held:
            state = "paused"
        elif not self.listens:
            state = "starting"
        elif self.life.is_resting(now):
            state = "resting"
        return DeviceWork(
            device=self.device,
            state=state,
            holds=self.yielding.holds,
            width=self.life.width,
            rollouts=rollouts,
            tokens_per_s=self.pace.tokens_per_s,
            precision=self.precision,
            problem="" if self.problem is None else self.problem.sentence,
        )


class Engines:
    """All engines of the node. `capacity_factor`: maximum number of held rollouts, as a multiple of the width."""

    def __init__(self, devices: Sequence[str], *, capacity_factor: int) -> None:
        self._engines = {device: DeviceEngine(device) for device in devices}
        self._capacity_factor = capacity_factor

    def __iter__(self) -> Iterator[DeviceEngine]:
        return iter(self._engines.values())

    def __getitem__(self, device: str) -> DeviceEngine:
        return self._engines[device]

    @property
    def listening(self) -> list[DeviceEngine]:
        """Engines that may get commands."""
        return [engine for engine in self if engine.listens]

    @property
    def is_held(self) -> bool:
        """True while all engines pause for the machine's owner."""
        return all(engine.is_held for engine in self)

    @property
    def any_is_sound(self) -> bool:
        """True if an engine has no problem."""
        return any(engine.problem is None for engine in self)

    @property
    def can_score(self) -> bool:
        return any(engine.scores and not engine.is_held for engine in self)

    @property
    def tokens_per_s(self) -> float:
        """Summed speed of the working engines, or of all engines if none works; 0 = unknown."""
        able = [engine for engine in self if engine.life.is_up and not engine.is_held] or list(self)
        return sum(engine.pace.tokens_per_s for engine in able)

    def is_other_up(self, device: str) -> bool:
        """Return True if the engine of another device is up."""
        return any(engine.life.is_up for engine in self if engine.device != device)

    def capacity(self, now: float) -> int:
        """Return the number of rollouts that the engines can hold together; 0 = none takes work."""
        windows = [engine.window(self._capacity_factor) for engine in self if engine.takes_work(now)]
        return min(MAX_BATCHED, sum(windows))

    def held_back(self, now: float) -> dict[HoldBack, bool]:
        """Return each reason for asking the hub for no work, with True if it applies to all engines."""
        return {
            "the engine is not up": all(not one.life.is_up or one.yielding.is_renewing for one in self),
            "groups keep failing": all(one.life.is_resting(now) for one in self),
            "the machine is its owner's": all(one.is_held or one.yielding.is_still for one in self),
        }

    def seats(self, now: float) -> list[Seats]:
        """Return the engines that may start rollouts now, with their capacities."""
        able = [engine for engine in self if engine.listens and not engine.is_held]
        chosen = [engine for engine in able if engine.takes_work(now)] or able
        weights = rates((engine.pace.tokens_per_s, engine.life.width) for engine in chosen)
        is_only = len(self._engines) == 1
        return [
            Seats(
                device=engine.device,
                width=engine.life.width,
                window=float("inf") if is_only else engine.window(self._capacity_factor),
                rate=weight,
            )
            for engine, weight in zip(chosen, weights, strict=True)
        ]

    def testing(self, num_by_device: Mapping[str, int]) -> str:
        """Return the device whose engine samples the leases on which engines have died: the one with the fewest
        rollouts. A restarting engine has no rollouts, so busy engines stay at work.
        """
        able = [engine.device for engine in self if not engine.is_held and engine.refusal is None]
        return min(able, key=lambda device: num_by_device[device], default="")

    def hold(self, event: Holding) -> list[DeviceEngine]:
        """Store the current holds (reasons to pause). Return the engines whose pause begins."""
        for engine in self:
            engine.share = event.shares.get(engine.device, 1.0)
        return [
            engine
            for engine in self
            if engine.yielding.hold(
                (*event.holds, *event.of_devices.get(engine.device, ())), keep_memory_s=event.keep_memory_s
            )
        ]

    def ready(self, event: EngineReady, now: float) -> list[Effect]:
        """Record an engine that has loaded its model. End it if its precision differs from that of the other engines.
        Suspended engines count: they resume with their precision.
        """
        engine = self._engines[event.device]
        staying = (one for one in self if one.life.is_up and not one.yielding.is_leaving)
        other = next((one for one in staying if one.precision and one is not engine), None)
        if other is not None and event.precision and other.precision != event.precision:
            engine.refusal = _refusal(engine.device, event.precision, other)
            return engine.yielding.end()
        engine.ready(event, now)
        return []

    def outdated(self, engine: DeviceEngine) -> bool:
        """Forget the reason for which an engine must not run. Return True if the engine must start now."""
        was_refused, engine.refusal = engine.refusal is not None, None
        return was_refused and not engine.yielding.exists


def _refusal(device: str, precision: str, other: DeviceEngine) -> Trouble:
    return Trouble(
        TroubleCode.ENGINE,
        f"{device} is not used: its engine draws in {precision}, and that of {other.device} in {other.precision}. The "
        "hub judges a node by one precision. Set one that both devices can: echo-node config set precision f16. Or "
        "remove one device from the setting devices, and run another node on it with its own --data-dir.",
    )
