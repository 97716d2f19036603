"""The verifier process: `python -m echo_hub.verify.worker`, controlled by `echo_hub.verify.verifier`.

It computes nodes' rollouts again, with the versions that they name. It uses the learner's packed forward pass, with the
published base and adapters; one prefill handles rollouts of several versions. A rollout with several versions is
computed once per version, up to the end of the version's part. The evidence of each span concerns the node that drew
the span.

Its input comes from nodes that are not trusted: an invalid rollout is answered with a reason and never reaches the
device. The process has low priority, and frees the device's memory whenever it is idle. On request, it measures how
coarsely engines of a kind round (`measuring`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from echo_hub.core.trust.evidence import Evidence
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.device import resolve_device
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.verify.drawn import DrawnRollout, pack_evidence
from echo_hub.verify.emulation import exactly
from echo_hub.verify.measuring import contexts, measured
from echo_shared.errors import BackendError, LearnerError
from echo_shared.process.answering import serve
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.records.rollout import unpack_payload
from echo_shared.sampling import draws

log = logging.getLogger(__name__)

NICENESS: Final = 10
"""Niceness of the process on POSIX systems. On a processor core that it shares with the learner, the verifier gets
about a tenth of the learner's time."""
FLOAT32_SHARE: Final = 0.25
"""Largest share of a GPU's memory that the base may take in float32. A larger base is held in the 16-bit type of its
files."""

_STORED: Final = {"BF16": torch.bfloat16, "F16": torch.float16}
"""PyTorch's 16-bit types, by their names in safetensors files."""

_Found = NDArray[np.float64]
"""Array of shape [2, N] for N tokens: the lower end of the interval of cumulative probability that draws each token,
and its true log-probability in nats. For a greedy token, the first value is how far its log-probability is below that
of the most likely token, in nats."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Case:
    """A rollout under examination. `missing`: number of its tokens without a result so far."""

    drawn: DrawnRollout
    missing: int
    found_2T: NDArray[np.float64]
    """Results as in `_Found`, for the T tokens of the rollout."""
    seconds: float = 0.0
    cannot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Tokens `start` to `stop` - 1 of a rollout, which were all drawn with one version."""

    case: _Case = field(repr=False)
    policy_version: int
    start: int
    stop: int


_Adapters = dict[int, Mapping[str, Tensor]]


class Examiner:
    """Recomputes nodes' rollouts, and returns evidence about the nodes that drew them; create it with `open`."""

    def __init__(
        self,
        policy: Policy,
        settings: LearnerSettings,
        *,
        kept: int,
        in_float32: bool = False,
    ) -> None:
        """`policy`: the base (version 0). `kept`: number of adapters kept on its device. `in_float32`: compute in
        float32, whatever the weights are stored in.
        """
        self._policy = policy
        self._settings = settings
        self._kept = kept
        self._in_float32 = in_float32
        self._base = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
        self._adapters: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()
        self._contexts: tuple[int, list[WeightedGroup]] | None = None
        """The version measured last, and its completions: on these, roundings are measured."""
        self._clock = time.process_time if policy.device.type == "cpu" else time.perf_counter

    @classmethod
    def open(cls, frame: Frame) -> Examiner:
        """Load the base. It computes in float32, unless the settings name another precision.

        Raises LearnerError if the base cannot be loaded.
        """
        settings = LearnerSettings.model_validate(frame["settings"])
        torch.set_num_threads(max(1, settings.learner.threads))
        held_in: torch.dtype | None = None
        if settings.learner.precision == "auto":
            held_in = torch.float32 if is_float32_affordable(settings) else stored_dtype(settings.base_dir)
        try:
            policy = Policy.load(settings, dtype=held_in)
        except torch.OutOfMemoryError as error:
            raise LearnerError(
                "The verifier's device has not enough memory for the base model.",
                got=f"trust.verifier_device = {settings.learner.device}: {error}",
                do='Set trust.verifier_device to another device, such as "cpu".',
            ) from error
        return cls(policy, settings, kept=frame["kept"], in_float32=held_in in _STORED.values())

    def measure(
        self, rounding: str, version: int, adapters: Mapping[int, Path], prompts: Sequence[NDArray[np.int32]]
    ) -> Frame:
        """Return the answer to a measurement: the evidence of an honest engine with this rounding and version, or why
        measuring failed."""
        began = self._clock()
        try:
            adapter = self._adapter(version, adapters)
            if self._contexts is None or self._contexts[0] != version:
                self._policy.set_adapter(adapter)
                self._contexts = version, contexts(self._policy, self._settings, prompts, seed=version)
            evidence = measured(
                self._policy,
                self._settings,
                rounding,
                self._contexts[1],
                adapter=adapter,
                seed=version,
                in_float32=self._in_float32,
            )
        except (LearnerError, BackendError, torch.OutOfMemoryError) as error:
            return {"rounding": rounding, "cannot": str(error)}
        if not evidence.is_finite:
            return {"rounding": rounding, "cannot": "The policy's logits are not finite."}
        return {"rounding": rounding, "evidence": pack_evidence(evidence), "seconds": self._clock() - began}

    def examine(self, rollouts: Sequence[DrawnRollout], adapters: Mapping[int, Path]) -> Iterator[Frame]:
        """Yield one answer for each rollout as soon as it is computed, rollouts of older versions first.

        `adapters` has the directory of each version's adapter.
        """
        began = self._clock()
        pieces = []
        for drawn in rollouts:
            if problem := self._problem(drawn):
                yield {"rollout_id": drawn.rollout_id, "cannot": problem}
            else:
                pieces += _pieces(drawn)
        pieces.sort(key=_version)
        weights: _Adapters = {}
        for version, of_version in groupby(pieces, key=_version):
            try:
                weights[version] = self._adapter(version, adapters)
            except LearnerError as error:
                yield from _refused(list(of_version), f"The adapter of version {version} is gone: {error.got}")
        for part, found in self._computed([piece for piece in pieces if not piece.case.cannot], weights):
            ended = self._clock()
            _spread(ended - began, part)
            began = ended
            yield from _refused(part, "The device has too little memory.") if found is None else _taken(part, found)
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def _problem(self, drawn: DrawnRollout) -> str:
        """Return why a rollout is invalid and is not computed; "" if it is valid."""
        count = len(drawn.completion_ids)
        if not count or not len(drawn.prompt_ids) or len(drawn.behavior_logprobs) != count:
            return (
                f"{len(drawn.prompt_ids)} prompt tokens, {count} sampled tokens, "
                f"{len(drawn.behavior_logprobs)} claimed log-probabilities"
            )
        if sum(span.num_tokens for span in drawn.spans) != count or min(span.num_tokens for span in drawn.spans) < 1:
            return f"spans of {[span.num_tokens for span in drawn.spans]} tokens for {count} sampled tokens"
        if not np.isfinite(drawn.behavior_logprobs).all():
            return "A claimed log-probability is not finite."
        vocabulary = self._policy.vocab_size
        ids = np.concatenate([drawn.prompt_ids, drawn.completion_ids])
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"token ids {ids.min()} to {ids.max()}, with a vocabulary of {vocabulary}"
        return ""

    def _adapter(self, version: int, adapters: Mapping[int, Path]) -> Mapping[str, Tensor]:
        """Return a version's adapter, from memory or from its directory. Raises LearnerError if the directory is
        gone."""
        if version == 0:
            return self._base
        adapter = self._adapters.pop(version, None)
        if adapter is None:
            read = self._policy.read_adapter(adapters[version])
            adapter = {name: weight.to(self._policy.device) for name, weight in read.items()}
        self._adapters[version] = adapter
        if len(self._adapters) > self._kept:
            self._adapters.popitem(last=False)
        return adapter

    def _computed(
        self, pieces: Sequence[_Piece], adapters: _Adapters, *, each_alone: bool = False
    ) -> Iterator[tuple[Sequence[_Piece], _Found | None]]:
        """Yield pieces, one micro-batch at a time, with the results of all their tokens, in order. Results None: the
        memory does not even suffice for this single piece. `each_alone`: compute one piece at a time."""
        together, pieces = _by_prompt(pieces)
        budget = 1 if each_alone else self._settings.learner.tokens_at_once
        done = 0
        for batch in build_micro_batches(together, micro_batch_tokens=budget):
            part = pieces[done : done + batch.num_rollouts]
            done += batch.num_rollouts
            by_version = [list(of_version) for _, of_version in groupby(part, key=_version)]
            if len(by_version) > 1 and not self._policy.takes_several(batch):
                for of_version in by_version:
                    yield from self._computed(of_version, adapters)
                continue
            try:
                found = self._found(batch, part, [(adapters[_version(of[0])], _positions(of)) for of in by_version])
            except torch.OutOfMemoryError:
                found = None
            if found is not None or len(part) == 1:
                yield part, found
            else:
                log.warning("too little memory for %d rollouts at once: checking them one by one", len(part))
                torch.cuda.empty_cache()
                yield from self._computed(part, adapters, each_alone=True)

    def _found(
        self, batch: MicroBatch, pieces: Sequence[_Piece], adapters: Sequence[tuple[Mapping[str, Tensor], int]]
    ) -> _Found:
        moved, greedy_N = batch.to(self._policy.device), _greedy(pieces)
        if greedy_N is not None:
            greedy_N = greedy_N.to(self._policy.device)
        with exactly(in_float32=self._in_float32):
            below_N, logprobs_N = self._policy.intervals(moved, greedy_N=greedy_N, adapters=adapters)
        return np.stack([below_N.numpy(force=True), logprobs_N.numpy(force=True)])


def is_float32_affordable(settings: LearnerSettings) -> bool:
    device = resolve_device(settings.learner.device)
    if device.type != "cuda":
        return True
    held = sum(path.stat().st_size for path in settings.base_dir.glob("*.safetensors"))
    _, total = torch.cuda.mem_get_info(device)
    return 2 * held <= FLOAT32_SHARE * total  # Files usually hold 16 bits per weight, and never more than 32.


def stored_dtype(base_dir: Path) -> torch.dtype:
    """Return the 16-bit type in which all of the base's weights are stored; float32 if there is no such type."""
    stored: set[str] = set()
    for path in base_dir.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            names = weights.keys()
            stored.update(weights.get_slice(name).get_dtype() for name in names)
    return _STORED.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32


def _pieces(drawn: DrawnRollout) -> list[_Piece]:
    count = len(drawn.completion_ids)
    case = _Case(drawn=drawn, missing=count, found_2T=np.empty((2, count)))
    pieces = []
    start = 0
    for version, spans in groupby(drawn.spans, key=lambda span: span.policy_version):
        stop = start + sum(span.num_tokens for span in spans)
        pieces.append(_Piece(case=case, policy_version=version, start=start, stop=stop))
        start = stop
    return pieces


def _by_prompt(pieces: Sequence[_Piece]) -> tuple[list[WeightedGroup], list[_Piece]]:
    """Group the pieces by version and prompt, as the learner packs them. Return the groups, and the pieces in the order
    of the groups.
    """
    families: dict[tuple[int, bytes], list[_Piece]] = {}
    for piece in pieces:
        families.setdefault((piece.policy_version, _prompt(piece)), []).append(piece)
    groups = [
        WeightedGroup(prompt_ids=members[0].case.drawn.prompt_ids, rollouts=tuple(map(_weighted, members)))
        for members in families.values()
    ]
    return groups, [piece for members in families.values() for piece in members]


def _positions(of_version: Sequence[_Piece]) -> int:
    """Return the number of positions that these pieces take in a micro-batch: each prompt once, and each completion
    without its last token.
    """
    prompts = sum(len(next(same).case.drawn.prompt_ids) for _, same in groupby(of_version, key=_prompt))
    return prompts + sum(piece.stop - 1 for piece in of_version)


def _version(piece: _Piece) -> int:
    return piece.policy_version


def _prompt(piece: _Piece) -> bytes:
    return piece.case.drawn.prompt_ids.astype("<i4").tobytes()


def _weighted(piece: _Piece) -> WeightedRollout:
    """Return a piece as a rollout that ends with the piece. Its tokens before the piece are computed, but not
    examined."""
    drawn = piece.case.drawn
    return WeightedRollout(
        completion_ids=drawn.completion_ids[: piece.stop],
        loss_mask=np.arange(piece.stop) >= piece.start,
        behavior_logprobs=drawn.behavior_logprobs[: piece.stop],
        advantages=np.zeros(piece.stop - piece.start),
        weight=0.0,
    )


def _uniforms(drawn: Sequence[DrawnRollout]) -> NDArray[np.float64]:
    """Return the uniforms (random numbers of the draws) of all tokens of these rollouts, one rollout after the
    other."""
    return draws.all_uniforms((one.seed, one.index, len(one.completion_ids)) for one in drawn)


def _greedy(pieces: Sequence[_Piece]) -> Tensor | None:
    """Return a boolean for each token of the pieces, True in greedy completions; None if no completion is greedy."""
    of_pieces = [piece.case.drawn.is_greedy for piece in pieces]
    if not any(of_pieces):
        return None
    return torch.from_numpy(np.repeat(of_pieces, [piece.stop - piece.start for piece in pieces]))


def _spread(seconds: float, pieces: Sequence[_Piece]) -> None:
    """Divide the time of a batch among its pieces, in proportion to their computed tokens."""
    tokens = [len(piece.case.drawn.prompt_ids) + piece.stop for piece in pieces]
    for piece, own in zip(pieces, tokens, strict=True):
        piece.case.seconds += seconds * own / sum(tokens)


def _taken(pieces: Sequence[_Piece], found_2N: _Found) -> list[Frame]:
    """Store the results of these pieces. Return the answers of the rollouts that this completes."""
    end = 0
    complete = []
    for piece in pieces:
        case, count = piece.case, piece.stop - piece.start
        begin, end = end, end + count
        case.found_2T[:, piece.start : piece.stop] = found_2N[:, begin:end]
        case.missing -= count
        if case.missing == 0 and not case.cannot:
            complete.append(case)
    return _answers(complete)


def _refused(pieces: Sequence[_Piece], why: str) -> Iterator[Frame]:
    for piece in pieces:
        if not piece.case.cannot:
            piece.case.cannot = why
            yield {"rollout_id": piece.case.drawn.rollout_id, "cannot": why}


def _answers(cases: Sequence[_Case]) -> list[Frame]:
    """Return the answers of complete rollouts, each with the evidence about every part that one node drew, in token
    order.

    All rollouts are examined together, because most are short.
    """
    answers: list[Frame] = []
    told = []
    for case in cases:
        if np.isnan(case.found_2T).any():
            answers.append({"rollout_id": case.drawn.rollout_id, "cannot": "The policy's logits are not finite."})
        else:
            told.append(case)
    if not told:
        return answers
    drawn = [case.drawn for case in told]
    below_N, logprobs_N = np.concatenate([case.found_2T for case in told], axis=1)
    shown = iter(
        Evidence.of_spans(
            below_N,
            logprobs_N,
            _uniforms(drawn),
            np.concatenate([one.behavior_logprobs for one in drawn]),
            [span.num_tokens for one in drawn for span in one.spans],
            greedy_N=np.repeat([one.is_greedy for one in drawn], [len(one.completion_ids) for one in drawn]),
        )
    )
    for case in told:
        spans = [{"node_id": span.node_id, **pack_evidence(next(shown))} for span in case.drawn.spans]
        answers.append({"rollout_id": case.drawn.rollout_id, "spans": spans, "seconds": case.seconds})
    return answers


def opened(opening: Frame) -> Callable[[Frame], Iterator[Frame]]:
    """Load the base and return the function that answers requests, for `answering.serve`. Raises LearnerError if the
    base cannot be loaded."""
    examiner = Examiner.open(opening)

    def answers(request: Frame) -> Iterator[Frame]:
        adapters = {version: Path(path) for version, path in request["adapters"].items()}
        if "prompts" in request:
            for rounding in request["asked"]:
                yield examiner.measure(rounding, request["version"], adapters, request["prompts"])
        else:
            yield from examiner.examine([unpack_payload(DrawnRollout, frame) for frame in request["asked"]], adapters)

    return answers


def yield_to_others() -> None:
    me = psutil.Process()
    if sys.platform == "win32":
        me.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    else:
        me.nice(max(NICENESS, int(me.nice())))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    yield_to_others()
    sys.exit(serve(ParentPipe(), opened))
