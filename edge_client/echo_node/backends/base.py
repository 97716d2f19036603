"""Interface of a sampling engine. Engines run in a child process, see `worker`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import BackendError
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest, check_prefixes
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits on the engine's use of the machine. Zero means: the engine chooses."""

    device: str = "cpu"
    width: int = 0
    """Maximum number of rollouts sampled at the same time."""
    threads: int = 0
    """Maximum number of CPU threads."""
    precision: str = "auto"
    """auto, f32, f16, bf16, q8_0 or a K-quant such as q4_k_m. An engine without the precision raises BackendError."""
    kv_cache_bytes: int = 0
    """Memory for the keys and values of all unfinished rollouts, in bytes."""
    kept_keys_share: float = 0.0
    """Memory for the kept keys and values of finished rollouts, as a share of the memory for unfinished ones."""
    helpers: tuple[str, ...] = ()
    """host:port of helpers: other machines (`echo-node lend`) whose devices each hold a part of the model. llama.cpp
    only.
    """
    doors: tuple[int, ...] = ()
    """File descriptors of listening loopback sockets, one for each of `helpers`. llama.cpp connects to the socket, and
    a tunnel forwards the connection to the helper. The worker opens the sockets, because an engine in its cage
    (sandbox) may not open any.
    """
    stream_s: float = 0.0
    """Seconds of sampling between two reports of unfinished rollouts' tokens and of prepared versions. 0 = no reports:
    a cancelled rollout then loses all its tokens. The worker sets this value.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """Report that the engine cannot sample the rollouts of this lease. The engine continues with its other leases."""

    lease_id: int
    code: str
    what: str

    @classmethod
    def of(cls, lease_id: int, error: BackendError) -> GroupFailed:
        return cls(lease_id=lease_id, code=error.code, what=error.brief)


EngineEvent = FinishedRollout | GroupFailed

OUT_OF_MEMORY: Final = "out_of_memory"
"""Code of a BackendError after which a smaller width (rollouts at the same time) may help. The engine is unusable
afterwards.
"""

TOO_LONG: Final = "too_long"
"""Code of a BackendError for a group that exceeds the model's context or the memory for keys and values."""


class PreparedPolicy(Protocol):
    """An adapter in its engine's own format, prepared in advance so that `set_policy` takes no time."""

    def free(self) -> None:
        """Free the adapter's memory, on the engine's thread. The engine must not be using the adapter."""


class Engine(Protocol):
    """A sampling engine: draws completions from one base model, with one adapter after another.

    Calls come from one thread: `open`, then `set_policy` and `sample` in turns, then `close`. Another thread may call
    only `prepare`, one call at a time, even during `sample`. Any method that computes may raise BackendError with the
    code OUT_OF_MEMORY.
    """

    precision: str
    """Precision of the weights after `open`: f32, f16, bf16, q8_0 ...; empty = unknown."""
    scores: bool
    """True if the engine can recompute other nodes' completions (`score`)."""
    converted: Path | None
    """Converted weights in the derived directory that the open engine reads; None: the engine reads the base model's
    own files.
    """

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        """Load the base model. Return the number of rollouts sampled at the same time. Raises BackendError if loading
        fails.
        """

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        """Read, check and convert an adapter for `set_policy`. Raises BackendError or CodecError."""

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        """Sample with this policy from now on; None is the base model without adapter. Not allowed while `sample` runs.

        Raises BackendError on failure. After a failure, call `set_policy` again before the next `sample`.
        """

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        """Sample the rollouts of all groups in one continuous batch. Yield the events of each step, often none.

        The engine takes a group from `groups` whenever it has capacity, and asks again later if `groups` had none. The
        iterator ends when `groups` has none and no rollout runs. Raises BackendError if the whole engine failed;
        `sample` may then be called again.
        """

    def cancel(self, lease_id: int) -> None:
        """Drop the lease's unfinished rollouts. Allowed only between two steps of `sample`."""

    def news(self) -> list[DrawnPart]:
        """Return the tokens of unfinished rollouts drawn since the last call, without the prefixes that the requests
        gave. Allowed only between two steps of `sample`.

        A rollout's last tokens come only with its FinishedRollout.
        """

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        """Compute, for each token of `ids[first:]`, its interval of cumulative probability under the current policy:
        sampling draws the token if its random number lies in this interval.

        Requires `first` >= 1 and no running `sample`. Raises BackendError; the engine stays usable, whatever the
        error's code.
        """

    @property
    def kept(self) -> KeptKeys:
        """Memory and use of the keys and values of finished rollouts that the engine keeps for later turns."""

    def forget(self, version: int | None = None) -> None:
        """Drop the kept keys and values of a version; None: of all versions."""

    def close(self) -> None:
        """Free the model and all other memory of the engine. Allowed even if no model is open."""


def check_ids(ids: NDArray[np.int32], *, vocab_size: int, max_positions: int) -> None:
    """Raise BackendError unless the ids are in the vocabulary and fit the context of `max_positions` tokens."""
    if len(ids) - 1 > max_positions:
        raise BackendError("The text does not fit into the model's context.", got=f"{len(ids)} tokens", code=TOO_LONG)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise BackendError("The text holds a token that the model does not have.", got=f"vocabulary of {vocab_size}")


def check_request(request: GroupRequest, *, vocab_size: int, max_positions: int) -> None:
    """Raise BackendError unless the group fits the model's vocabulary and context."""
    length = len(request.prompt_ids) + request.max_tokens - 1
    if len(request.prompt_ids) == 0 or length > max_positions:
        raise BackendError(
            "A prompt and its completion do not fit into the context.",
            got=f"{len(request.prompt_ids)} + {request.max_tokens} tokens, {max_positions} at most",
            code=TOO_LONG,
        )
    if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= vocab_size:
        raise BackendError(
            "A prompt holds a token that the model does not have.", got=f"vocabulary of {vocab_size}", code="bad_prompt"
        )
    check_prefixes(request, vocab_size=vocab_size)
