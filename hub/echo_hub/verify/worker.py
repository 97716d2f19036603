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
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from echo_hub.core.trust.evidence import Evidence
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.device import resolve_device
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup
from echo_hub.verify.drawn import DrawnRollout, pack_evidence
from echo_hub.verify.emulation import exactly
from echo_hub.verify.gguf_weights import GgufWeights
from echo_hub.verify.measuring import contexts, measured
from echo_hub.verify.repeats import RepeatedTokens
from echo_hub.verify.worker_pieces import (
    FoundTokens,
    RecomputedRollout,
    RolloutPiece,
    by_prompt,
    greedy_tokens,
    num_positions,
    pieces_of,
    refused,
    spread_seconds,
    taken,
    version_of,
)
from echo_shared.errors import BackendError, CodecError, LearnerError
from echo_shared.process.answering import serve
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.process.priority import yield_to_others
from echo_shared.records.rollout import unpack_payload
from echo_shared.sampling import draws
from echo_shared.wire.messages.engines import weights_of_file
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

log = logging.getLogger(__name__)

FLOAT32_SHARE: Final = 0.25
"""Largest share of a GPU's memory that the base may take in float32. A larger base is held in the 16-bit type of its
files."""

_STORED: Final = {"BF16": torch.bfloat16, "F16": torch.float16}
"""PyTorch's 16-bit types, by their names in safetensors files."""


_Adapters = dict[int, Mapping[str, Tensor]]


class OfferedFile(NamedTuple):
    """The GGUF file that nodes use in place of the base."""

    precision: str
    """Precision that nodes with this file report."""
    path: str
    """Path of the file, or of its first part."""


class Examiner:
    """Recomputes nodes' rollouts, and returns evidence about the nodes that drew them; create it with `open`."""

    def __init__(
        self,
        policy: Policy,
        settings: LearnerSettings,
        *,
        kept: int,
        in_float32: bool = False,
        gguf: OfferedFile | None = None,
    ) -> None:
        """`policy`: the base (version 0). `kept`: number of adapters kept on its device. `in_float32`: compute in
        float32, whatever the weights are stored in. `gguf`: the GGUF file that nodes use in place of the base.
        """
        self._policy = policy
        self._settings = settings
        self._kept = kept
        self._in_float32 = in_float32
        self._gguf = gguf
        self._gguf_weights: GgufWeights | None = None
        self._repeats = RepeatedTokens()
        self._base = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
        self._adapters: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()
        self._contexts: tuple[int, list[WeightedGroup]] | None = None
        """Policy version of the newest measurement, and the completions on which roundings are measured."""
        self._clock = time.process_time if policy.device.type == "cpu" else time.perf_counter

    @classmethod
    def open(cls, frame: Frame) -> Examiner:
        """Load the base model. It computes in float32, unless the settings name another precision.

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
        gguf = None if frame.get("gguf") is None else OfferedFile(*frame["gguf"])
        return cls(policy, settings, kept=frame["kept"], in_float32=held_in in _STORED.values(), gguf=gguf)

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
                file=self._weights_of(rounding),
            )
        except (LearnerError, BackendError, CodecError, torch.OutOfMemoryError) as error:
            return {"rounding": rounding, "cannot": str(error)}
        if not evidence.is_finite:
            return {"rounding": rounding, "cannot": "The policy's logits are not finite."}
        return {"rounding": rounding, "evidence": pack_evidence(evidence), "seconds": self._clock() - began}

    def _weights_of(self, rounding: str) -> GgufWeights | None:
        """Return the weights of the GGUF file that this rounding names; None if it names none. Raises LearnerError if
        the file is missing on this machine.
        """
        if weights_of_file(rounding) is None:
            return None
        if self._gguf is None or rounding != self._gguf.precision or not Path(self._gguf.path).is_file():
            raise LearnerError("This GGUF file is not here.", got=rounding)
        if self._gguf_weights is None:
            self._gguf_weights = GgufWeights(Path(self._gguf.path), self._policy.base_weights, self._settings.base_dir)
        return self._gguf_weights

    def examine(self, rollouts: Sequence[DrawnRollout], adapters: Mapping[int, Path]) -> Iterator[Frame]:
        """Yield one answer for each rollout as soon as it is computed, rollouts of older versions first.

        `adapters` has the directory of each version's adapter.
        """
        for cases in self.recomputed(rollouts, adapters):
            yield from _answers(cases, temperature=self._settings.temperature, repeats=self._repeats)

    def recomputed(
        self, rollouts: Sequence[DrawnRollout], adapters: Mapping[int, Path]
    ) -> Iterator[Sequence[RecomputedRollout]]:
        """Yield the rollouts with their results, in parts. Each rollout occurs once, rollouts of older versions first.

        The arguments are those of `examine`.
        """
        began = self._clock()
        pieces = []
        for drawn in rollouts:
            if problem := self._problem(drawn):
                yield [RecomputedRollout(drawn=drawn, missing=0, found_2T=np.empty((2, 0)), cannot=problem)]
            else:
                pieces += pieces_of(drawn)
        pieces.sort(key=version_of)
        weights: _Adapters = {}
        for version, of_version in groupby(pieces, key=version_of):
            try:
                weights[version] = self._adapter(version, adapters)
            except LearnerError as error:
                yield refused(list(of_version), f"The adapter of version {version} is gone: {error.got}")
        for part, found in self._computed([piece for piece in pieces if not piece.case.cannot], weights):
            ended = self._clock()
            spread_seconds(ended - began, part)
            began = ended
            yield refused(part, "The device has too little memory.") if found is None else taken(part, found)
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
            is_tenants = version >= FIRST_TENANT_VERSION
            read = (self._policy.read_foreign if is_tenants else self._policy.read_adapter)(adapters[version])
            adapter = {name: weight.to(self._policy.device) for name, weight in read.items()}
        self._adapters[version] = adapter
        if len(self._adapters) > self._kept:
            self._adapters.popitem(last=False)
        return adapter

    def _computed(
        self, pieces: Sequence[RolloutPiece], adapters: _Adapters, *, each_alone: bool = False
    ) -> Iterator[tuple[Sequence[RolloutPiece], FoundTokens | None]]:
        """Yield pieces, one micro-batch at a time, with the results of all their tokens, in order. A result of None
        means that the device's memory cannot hold a single piece. `each_alone`: compute one piece at a time."""
        together, pieces = by_prompt(pieces, self._policy.routers)
        budget = 1 if each_alone else self._settings.learner.tokens_at_once
        done = 0
        for batch in build_micro_batches(together, micro_batch_tokens=budget):
            part = pieces[done : done + batch.num_rollouts]
            done += batch.num_rollouts
            by_version = [list(of_version) for _, of_version in groupby(part, key=version_of)]
            if len(by_version) > 1 and not self._policy.takes_several(batch):
                for of_version in by_version:
                    yield from self._computed(of_version, adapters)
                continue
            try:
                found = self._found(
                    batch, part, [(adapters[version_of(of[0])], num_positions(of)) for of in by_version]
                )
            except torch.OutOfMemoryError:
                found = None
            if found is not None or len(part) == 1:
                yield part, found
            else:
                log.warning("too little memory for %d rollouts at once: checking them one by one", len(part))
                torch.cuda.empty_cache()
                yield from self._computed(part, adapters, each_alone=True)

    def _found(
        self, batch: MicroBatch, pieces: Sequence[RolloutPiece], adapters: Sequence[tuple[Mapping[str, Tensor], int]]
    ) -> FoundTokens:
        moved, greedy_N = batch.to(self._policy.device), greedy_tokens(pieces)
        if greedy_N is not None:
            greedy_N = greedy_N.to(self._policy.device)
        temperature_N = torch.from_numpy(self._temperatures(pieces))
        with exactly(in_float32=self._in_float32):
            below_N, logprobs_N = self._policy.intervals(
                moved, greedy_N=greedy_N, temperature_N=temperature_N, adapters=adapters
            )
        return np.stack([below_N.numpy(force=True), logprobs_N.numpy(force=True)])

    def _temperatures(self, pieces: Sequence[RolloutPiece]) -> NDArray[np.float64]:
        """Return the temperature of each token of the pieces. Greedy tokens are compared at the run's temperature."""
        of_pieces = [temperature_of(piece.case.drawn, self._settings.temperature) for piece in pieces]
        return np.repeat(of_pieces, [piece.stop - piece.start for piece in pieces])


def temperature_of(drawn: DrawnRollout, of_run: float) -> float:
    """Return the temperature at which a rollout is examined. The run's own rollouts and greedy ones are examined at the
    run's temperature."""
    return of_run if drawn.temperature is None or drawn.is_greedy else drawn.temperature


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


def uniforms_of(drawn: Sequence[DrawnRollout]) -> NDArray[np.float64]:
    """Return the uniforms (random numbers of the draws) of all tokens of these rollouts, one rollout after the
    other."""
    return draws.all_uniforms((one.seed, one.index, len(one.completion_ids)) for one in drawn)


def _answers(cases: Sequence[RecomputedRollout], *, temperature: float, repeats: RepeatedTokens) -> list[Frame]:
    """Return the answers of complete rollouts, each with the evidence about every part that one node drew, in token
    order.
    """
    answers: list[Frame] = [
        {"rollout_id": case.drawn.rollout_id, "cannot": case.cannot} for case in cases if case.cannot
    ]
    told = [case for case in cases if not case.cannot]
    for case, shown in zip(told, evidence_of(told, temperature=temperature, repeats=repeats), strict=True):
        spans = [
            {"node_id": span.node_id, **pack_evidence(evidence)}
            for span, evidence in zip(case.drawn.spans, shown, strict=True)
        ]
        answers.append({"rollout_id": case.drawn.rollout_id, "spans": spans, "seconds": case.seconds})
    return answers


def evidence_of(
    cases: Sequence[RecomputedRollout], *, temperature: float, repeats: RepeatedTokens
) -> list[list[Evidence]]:
    """Return, for each of these computed rollouts, the evidence about each part that one node drew, in token order.
    `temperature`: that of the run. `repeats`: tokens of rollouts examined before; it remembers these, too.

    All rollouts are examined together, because most are short.
    """
    if not cases:
        return []
    drawn = [case.drawn for case in cases]
    counts = [len(one.completion_ids) for one in drawn]
    weights = [repeats.weights(one) for one in drawn]
    below_N, logprobs_N = np.concatenate([case.found_2T for case in cases], axis=1)
    shown = iter(
        Evidence.of_spans(
            below_N,
            logprobs_N,
            uniforms_of(drawn),
            np.concatenate([one.behavior_logprobs for one in drawn]),
            [span.num_tokens for one in drawn for span in one.spans],
            greedy_N=np.repeat([one.is_greedy for one in drawn], counts),
            warmth_N=np.repeat([temperature_of(one, temperature) / temperature for one in drawn], counts),
            draw_weights_N=np.concatenate([one.draws for one in weights]),
            claim_weights_N=np.concatenate([one.claims for one in weights]),
        )
    )
    return [[next(shown) for _ in one.spans] for one in drawn]


def opened(opening: Frame) -> Callable[[Frame], Iterator[Frame]]:
    """Load the base model, and return the function that answers requests, for `answering.serve`. Raises LearnerError if
    the base model cannot be loaded.
    """
    examiner = Examiner.open(opening)

    def answers(request: Frame) -> Iterator[Frame]:
        adapters = {version: Path(path) for version, path in request["adapters"].items()}
        if "prompts" in request:
            for rounding in request["asked"]:
                yield examiner.measure(rounding, request["version"], adapters, request["prompts"])
        else:
            yield from examiner.examine([unpack_payload(DrawnRollout, frame) for frame in request["asked"]], adapters)

    return answers


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    yield_to_others()
    sys.exit(serve(ParentPipe(), opened))
