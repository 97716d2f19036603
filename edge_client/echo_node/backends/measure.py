"""Measures an open engine: prompt tokens per second, and drawn tokens per second at several widths (rollouts at the
same time).

Prompts are random, the temperature is 1 and nothing stops a rollout, so the figures include sampling and bookkeeping.
Each of these figures gets a share of a time budget. A figure that takes much longer than its share is cancelled, and so
are all later figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, assert_never

import numpy as np

from echo_node.backends.base import TOO_LONG, Engine, GroupFailed
from echo_shared.errors import BackendError
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

Row = dict[str, Any]
"""One figure: kind (prefill or decode), width (rollouts at the same time), tokens, seconds, tokens_per_s."""

_LONGEST_PREFILL: Final = 512
_WARM_UP_PREFILL: Final = 32
_DECODE_PROMPT: Final = 8
_WARM_UP_TOKENS: Final = 2
_MOST_NEW_TOKENS: Final = 64
_MOST_CELLS: Final = 4_096
"""Maximum number of new tokens in all rollouts of a measurement together, so that each measured width (number of
parallel rollouts) fits into the engine's KV cache.
"""
_PATIENCE: Final = 3.0
"""Time limit for measuring one figure, as a multiple of the figure's share of the time budget."""


def widths_up_to(width: int) -> tuple[int, ...]:
    """Return the widths to measure on an engine that can sample `width` rollouts at the same time."""
    return tuple(sorted({*(step for step in (1, 8, 32, 64, 128, 256, 512, 1024) if step < width), width}))


def measure(engine: Engine, base_dir: Path, *, widths: Sequence[int], budget_s: float) -> list[Row]:
    """Measure the prefill, and drawing at each of `widths` (rollouts at the same time), within `budget_s` seconds,
    under the current policy.

    Return one row per measured speed. `widths` must ascend and not exceed the engine's width. Raises BackendError if
    the engine fails.
    """
    bench = _Bench(engine=engine, bounds=_read_bounds(base_dir))
    ends_at = time.perf_counter() + budget_s
    rows = []
    figures = [("prefill", 1), *(("decode", width) for width in widths)]
    for done, (kind, width) in enumerate(figures):
        share_s = (ends_at - time.perf_counter()) / (len(figures) - done)
        if share_s <= 0.0:
            break
        found = bench.prefill(share_s) if kind == "prefill" else bench.decode(width, share_s)
        if found is None:  # This measurement was cancelled, and those with larger widths would take even longer.
            break
        tokens, seconds = found
        row = {"kind": kind, "width": width, "tokens": tokens, "seconds": seconds}
        rows.append({**row, "tokens_per_s": tokens / seconds})
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    vocab_size: int
    max_positions: int


def _read_bounds(base_dir: Path) -> _Bounds:
    try:
        config = json.loads((base_dir / "config.json").read_bytes())
        return _Bounds(vocab_size=int(config["vocab_size"]), max_positions=int(config["max_position_embeddings"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError("The base model's config.json cannot be used.", got=f"{error!r}") from error


@dataclass(slots=True, kw_only=True)
class _Bench:
    engine: Engine
    bounds: _Bounds
    runs: int = 0

    def prefill(self, share_s: float) -> tuple[int, float] | None:
        """Measure the prefill of one prompt, which is as long as time and model allow. Return (prompt tokens, seconds);
        None if the measurement was cancelled.
        """
        longest = min(_LONGEST_PREFILL, self.bounds.max_positions)
        warm_up = min(_WARM_UP_PREFILL, longest)
        began = time.perf_counter()
        first_s = self._run(1, prompt_tokens=warm_up, new_tokens=1, limit_s=_PATIENCE * share_s)
        if first_s is None:
            return None
        again_s = self._run(1, prompt_tokens=warm_up, new_tokens=1, limit_s=_PATIENCE * share_s)
        if again_s is None:
            return warm_up, first_s
        left_s = share_s - (time.perf_counter() - began)
        length = min(longest, int(warm_up * left_s / again_s))
        if length <= warm_up:
            return warm_up, again_s
        seconds = self._run(1, prompt_tokens=length, new_tokens=1, limit_s=_PATIENCE * share_s)
        return (warm_up, again_s) if seconds is None else (length, seconds)

    def decode(self, width: int, share_s: float) -> tuple[int, float] | None:
        """Draw groups of `width` rollouts until the time `share_s` is used. Return (drawn tokens, seconds), including
        the short prompts; None if the measurement was cancelled.
        """
        prompt = max(1, min(_DECODE_PROMPT, self.bounds.max_positions // 4))
        most = max(1, min(_MOST_NEW_TOKENS, _MOST_CELLS // width, self.bounds.max_positions - prompt + 1))
        warm_up = min(_WARM_UP_TOKENS, most)
        limit_s = _PATIENCE * share_s
        began = time.perf_counter()
        warm_up_s = self._run(width, prompt_tokens=prompt, new_tokens=warm_up, limit_s=limit_s)
        if warm_up_s is None:
            return None
        if warm_up_s < share_s / 4:  # Warm up a second time: on CUDA, the engine captures the second step of a shape.
            warm_up_s = self._run(width, prompt_tokens=prompt, new_tokens=warm_up, limit_s=limit_s) or warm_up_s
        tokens, seconds = 0, 0.0
        while (left_s := share_s - (time.perf_counter() - began)) > 0:
            step_s = seconds / (tokens // width) if tokens else warm_up_s / warm_up
            new_tokens = min(most, int(left_s / step_s))
            if new_tokens < warm_up:
                break
            run_s = self._run(width, prompt_tokens=prompt, new_tokens=new_tokens, limit_s=limit_s)
            if run_s is None:
                break
            tokens, seconds = tokens + width * new_tokens, seconds + run_s
        return (tokens, seconds) if tokens else (width * warm_up, warm_up_s)

    def _run(self, width: int, *, prompt_tokens: int, new_tokens: int, limit_s: float) -> float | None:
        """Return the seconds for one group; None if the group was cancelled or memory is too small for it. Raises
        BackendError.
        """
        self.runs += 1
        rng = np.random.default_rng(self.runs)
        request = GroupRequest(
            lease_id=self.runs,
            group_id=self.runs,
            indices=tuple(range(width)),
            prompt_ids=rng.integers(0, self.bounds.vocab_size, prompt_tokens).astype(np.int32),
            seed=derive_seed("measure", self.runs),
            policy_version=0,
            temperature=1.0,
            max_tokens=new_tokens,
            stop_ids=(),
            keep_keys=False,
        )
        finished, cancelled = 0, False
        began = time.perf_counter()
        for events in self.engine.sample(_one(request)):
            for event in events:
                match event:
                    case FinishedRollout():
                        finished += 1
                    case GroupFailed(code=code, what=what):
                        if code == TOO_LONG:
                            # The prompt fits into the model's context, but not into the memory for keys and values.
                            return None
                        raise BackendError("The engine cannot sample the measuring prompt.", got=what)
                    case _:
                        assert_never(event)
            if not cancelled and finished < width and time.perf_counter() - began > limit_s:
                self.engine.cancel(request.lease_id)
                cancelled = True
        seconds = time.perf_counter() - began
        return seconds if finished == width else None


def _one(request: GroupRequest) -> Iterator[GroupRequest]:
    yield request
