"""The real worker around a scripted engine that misbehaves; tests start it in place of the real worker.

The engine logs its calls. Each of its rollouts is one token: the number of adapters that it has prepared.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_node.backends import registry, worker
from echo_node.backends.base import OUT_OF_MEMORY, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.delta.base_weights import NO_WEIGHTS
from echo_shared.errors import BackendError, CodecError
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Intervals
from echo_shared.wire.messages import FinishReason

FINE, HANG, HOARD, NO_ROOM, NO_MEMORY, BUG, HICCUP, RANT, TALK, MUSE, BURN, SHORT = range(12)
"""Faults. The first token of a prompt is the number of the fault."""

HOARD_BYTES = 400_000_000


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


class Policy:
    def __init__(self, name: str) -> None:
        self.name = name

    def free(self) -> None:
        say("freed", self.name)


class OddEngine:
    """A scripted engine. Files in the base's directory control it: `enough.json` holds the number of rollouts for which
    its memory suffices, `none.json` means that there are no weights, `precision.json` holds their precision. Of the
    converted files, it reads `read.gguf`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._prepared = 0
        self._talking: GroupRequest | None = None
        """The request whose first rollout grows by one token per step until it is cancelled."""
        self._drawn = self._told = 0
        self.precision, self.scores, self.kept = "", True, KeptKeys(kept_bytes=7)
        self.converted: Path | None = None

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        enough = base_dir / "enough.json"
        width = settings.width or 64
        if enough.exists() and width > json.loads(enough.read_text()):
            raise BackendError("It is too big.", got=f"width {width}", code=OUT_OF_MEMORY)
        if (base_dir / "none.json").exists():
            raise BackendError("There are no weights.", code=NO_WEIGHTS)
        if (derived_dir / "read.gguf").exists():
            self.converted = derived_dir / "read.gguf"
        if (base_dir / "precision.json").exists():
            self.precision = json.loads((base_dir / "precision.json").read_text())
        say("opened", self._name, settings.device, width)
        return width

    def prepare(self, adapter_dir: Path) -> Policy:
        if adapter_dir.name == "damaged":
            raise CodecError("It is damaged.")
        while adapter_dir.name == "slow" and not (adapter_dir / "go").exists():
            time.sleep(0.001)
        self._prepared += 1
        return Policy(adapter_dir.name)

    def forget(self, version: int | None = None) -> None:
        """Record the calls in `kept`, for the test to see: a call with a version counts as a hit; a call without one
        clears all but these hits.
        """
        self.kept = KeptKeys(hits=self.kept.hits) if version is None else self.kept + KeptKeys(hits=1)

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        say("set", policy.name if isinstance(policy, Policy) else None)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for request in groups:
            self._go_wrong(int(request.prompt_ids[0]))
            if (how := int(request.prompt_ids[0])) in (TALK, MUSE, BURN):
                step_s = 2 * worker.SLOW_STEP_S if how == MUSE else 0.001
                yield from self._talk(request, step_s=step_s, burns=how == BURN)
                continue
            yield [
                FinishedRollout(
                    lease_id=request.lease_id,
                    group_id=request.group_id,
                    index=index,
                    policy_version=request.policy_version,
                    completion_ids=np.array([self._prepared], np.int32),
                    behavior_logprobs=np.zeros(1, np.float32),
                    finish_reason=FinishReason.LENGTH,
                    sampling_s=0.0,
                )
                for index in request.indices
            ]

    def _talk(self, request: GroupRequest, *, step_s: float, burns: bool) -> Iterator[list[EngineEvent]]:
        self._talking = request
        self._drawn = self._told = 0
        while self._talking is not None:
            self._drawn += 1
            if burns:
                until_s = time.process_time() + step_s
                while time.process_time() < until_s:
                    pass
            else:
                time.sleep(step_s)
            yield []

    def _go_wrong(self, how: int) -> None:
        if how == SHORT:
            worker.MEMORY_EVERY_S, worker.SHORT_OF_MEMORY_BYTES = 0.0, 2**60
        if how == HOARD:
            self._hoard = np.ones(HOARD_BYTES // 8)
        if how in (HANG, HOARD):
            threading.Event().wait()
        if how == NO_ROOM:
            raise BackendError("No room for the keys.", code=OUT_OF_MEMORY)
        if how == NO_MEMORY:
            raise MemoryError("Unable to allocate 7 GiB")
        if how == BUG:
            raise RuntimeError("a bug in the engine")
        if how == HICCUP:
            raise BackendError("The engine has hiccups.")
        if how == RANT:
            raise BackendError("The engine failed.", got="error: no such kernel\n" * 1_000, do="Look into /home/me.")

    def cancel(self, lease_id: int) -> None:
        self._talking = None
        say("cancelled", lease_id, self._drawn)

    def news(self) -> list[DrawnPart]:
        if self._talking is None or self._told == self._drawn:
            return []
        ids = np.arange(self._told, self._drawn, dtype=np.int32)
        part = DrawnPart(
            lease_id=self._talking.lease_id,
            index=self._talking.indices[0],
            policy_version=self._talking.policy_version,
            start=self._told,
            ids=ids,
            logprobs=-ids.astype(np.float32),
        )
        self._told = self._drawn
        return [part]

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        """Return as score of each token the negative number of prepared adapters, so that a test sees how many there
        are.
        """
        self._go_wrong(int(ids[0]))
        say("scored", len(ids), first, temperature)
        count = len(ids) - first
        return np.full(count, 0.25), np.full(count, -float(self._prepared))

    def close(self) -> None:
        say("closed")


if __name__ == "__main__":
    registry.make_engine = OddEngine
    worker.main()
