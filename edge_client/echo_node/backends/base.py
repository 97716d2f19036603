"""What a sampling engine is, whichever library is behind it. An engine lives in a child process, see `worker`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import BackendError
from echo_shared.installation import how_to_install
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest, check_prefixes
from echo_shared.scoring import Intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How much of the machine the engine may use. Zeros mean the engine's own choice."""

    device: str = "cpu"
    width: int = 0
    """Rollouts sampled at once."""
    threads: int = 0
    precision: str = "auto"
    """auto, f32, f16, bf16, q8_0 or a K-quant such as q4_k_m; what an engine does not have is a BackendError."""
    kv_cache_bytes: int = 0
    """Memory for the keys and values of all rollouts in progress."""
    helpers: tuple[str, ...] = ()
    """host:port of other devices that hold a part of the model each; llama.cpp only."""
    doors: tuple[int, ...] = ()
    """Descriptors of sockets that listen on loopback, one for each helper, for an engine that may make none; the
    worker's."""
    stream_s: float = 0.0
    """Seconds of sampling after which the hub is to hear what unfinished rollouts have drawn; 0 = nobody hears of that,
    nor what versions are prepared: who cancels a rollout would lose all of it. The worker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """A lease that the engine cannot sample; the rest of its work goes on."""

    lease_id: int
    code: str
    what: str

    @classmethod
    def of(cls, lease_id: int, error: BackendError) -> GroupFailed:
        return cls(lease_id=lease_id, code=error.code, what=error.brief)


EngineEvent = FinishedRollout | GroupFailed

OUT_OF_MEMORY: Final = "out_of_memory"
"""Code of the BackendError that a smaller width may avoid; the engine is then of no more use."""

NO_WEIGHTS: Final = "no_weights"
"""Code of the BackendError for a base model whose safetensors files are not here."""

TOO_LONG: Final = "too_long"
"""Code of the BackendError for a group that does not fit into the model's or the machine's memory of a rollout."""


class PreparedPolicy(Protocol):
    """An adapter in the form that the engine which prepared it swaps in at once."""

    def free(self) -> None:
        """Gives back what it holds. Not for the policy in use. On the engine's thread."""


class Engine(Protocol):
    """Samples from one base model under one adapter after another.

    Calls come from one thread, in the order `open`, then `set_policy` and `sample` in turns, then `close`.

    Only `prepare` may be called by another thread, one at a time, also while `sample` runs. BackendError with the code
    OUT_OF_MEMORY may come from any method that computes.
    """

    precision: str
    """Of the weights, once it is open: f32, f16, bf16, q8_0 ...; empty = not known."""
    scores: bool
    """Whether it can `score`."""
    converted: Path | None
    """The file in the derived directory that the engine reads in place of the base model's weights, once it is open;
    None: the engine reads the base model's own files."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        """Loads the base model; returns how many rollouts it samples at once. Raises BackendError when it cannot."""

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        """Reads, checks and converts an adapter, so that `set_policy` need not. Raises BackendError or CodecError."""

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        """Samples by this policy from now on; None is the bare base. Not between two steps of `sample`.

        Raises BackendError when it cannot; a policy must then be set before the next `sample`.
        """

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        """Draws groups in one continuous batch; yields what each step finished, often nothing.

        The engine asks `groups` whenever it has room, again after it ran dry, and ends when it is dry and nothing runs.
        Raises BackendError when the engine as a whole failed; `sample` may then be called anew.
        """

    def cancel(self, lease_id: int) -> None:
        """Gives up the lease's rollouts in progress; called between two steps of `sample`."""

    def news(self) -> list[DrawnPart]:
        """What rollouts in progress have drawn since the last call, or since they began behind their prefix.

        Called between two steps of `sample`. What a rollout has drawn last comes with its FinishedRollout alone.
        """

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        """Computes the tokens from number `first` on, which is at least 1, each after all before it, under the policy
        that is set. Only while nothing is sampled. Raises BackendError; the engine goes on whatever its code."""

    def close(self) -> None:
        """Frees everything. Harmless when nothing is open."""


def weights_of(base_dir: Path) -> list[Path]:
    """Return the base model's safetensors files, in order. Raises BackendError with NO_WEIGHTS where there are none."""
    found = sorted(base_dir.glob("*.safetensors"))
    if not found:
        raise BackendError(
            "The base model's weights are not here as safetensors.",
            got=str(base_dir),
            do="A node that runs with this engine fetches them again. For a GGUF file, use llama_cpp.",
            code=NO_WEIGHTS,
        )
    return found


def unsupported_model(got: str) -> BackendError:
    return BackendError(
        "This backend cannot run the base model.",
        got=got,
        do=f"Run this node with the torch backend: {how_to_install('cuda')}, then: echo-node run --backend torch",
        code="unsupported_model",
    )


def check_ids(ids: NDArray[np.int32], *, vocab_size: int, max_positions: int) -> None:
    """Raises BackendError when a model with these bounds cannot be fed these."""
    if len(ids) - 1 > max_positions:
        raise BackendError("It does not fit into the context.", got=f"{len(ids)} tokens", code=TOO_LONG)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise BackendError("It holds a token that the model does not have.", got=f"vocabulary of {vocab_size}")


def check_request(request: GroupRequest, *, vocab_size: int, max_positions: int) -> None:
    """Raises BackendError when a model with these bounds cannot draw this group."""
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
