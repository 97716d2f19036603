"""Recompute the draws of a bundle's rollouts, and judge each node by them as the hub's verifier does.

These tests run side by side:

    per node      the sequential test of `echo_hub.core.trust.judging`, over the node's rollouts in the bundle's order,
                  with the rounding scale of the node's class. It finds nodes that forge a share of their tokens.
    per token     one token, if it lies so far outside of its interval that honest rounding of the class would not cause
                  this in any of the checked tokens. It finds single changed tokens of nodes that compute nearly
                  exactly, such as float32 engines; engines of 8 and 4 bits round too coarsely for it.

Rounding scales are measured on this machine (`echo_hub.verify.measuring`), for the precision that the hub recorded for
each node. This precision is the only claim of the hub that the test cannot check: it may be coarser than the node's
real one.

A third test is exact: a completion must end as the run's settings say. All tokens of a completion that a forger has cut
follow from the seed, but it ends neither at a stop token or stop string, nor at sampling.max_tokens.

Dropped rollouts are judged separately, because no step used them: often they led to a node's quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from math import log
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.bundles.discrepancies import Discrepancies, DiscrepancyKind
from echo_hub.core.trust.evidence import DRAW_EDGES, NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import Alternative, alarm, judged, proof_added, weigh
from echo_hub.core.trust.likelihood import NUM_SCALES, chance_of_distance
from echo_hub.core.trust.numerics import LEAST_TOKENS, Honest, Numerics, NumericsClass
from echo_hub.core.trust.reasons import what_is_wrong
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import Standing
from echo_hub.scoring.checks import SamplingBounds, check_payload
from echo_hub.verify.drawn import DrawnRollout, unpack_evidence
from echo_hub.verify.repeats import RepeatedTokens
from echo_hub.verify.worker import Examiner, evidence_of, uniforms_of
from echo_hub.verify.worker_pieces import RecomputedRollout
from echo_shared.errors import RemoteProtocolError
from echo_shared.sampling.draws import nats_outside

AT_ONCE: Final = 64
"""Largest number of rollouts that are computed together. A larger number saves little time, and delays the end after
Ctrl-C."""
STRIKING: Final = 5.0
"""Smallest evidence of forgery in a rollout, in nats, with which the report names it for a convicted node."""
NAMED: Final = 8
"""Largest number of rollouts that the report names for one node."""
FALSE_NAMES: Final = 1e-3
"""Largest number of honest tokens, among all checked tokens, that the test of single tokens may be expected to name by
mistake."""
MOST_FAR: Final = 1_000
"""Largest number of the least probable tokens that are kept for the test of single tokens."""
_MISS: Final = TrustSettings().miss
_ALARM: Final = alarm(TrustSettings().false_alarm)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The verdict about one node, from its recomputed draws."""

    node: str
    is_used: bool
    """True if the verdict is about rollouts that the run uses, False if it is about rollouts that the hub dropped."""
    numerics: str
    rollouts: int
    tokens: int
    outside: int
    """Number of tokens whose random number lies outside the interval that draws the token, by more than the first
    threshold of `DRAW_EDGES`."""
    far: int
    """Number of tokens whose random number lies outside this interval by more than the last threshold of `DRAW_EDGES`,
    1 nat."""
    farthest_nats: float
    nats: float
    """Highest value that the evidence against the node has reached, in nats. At `alarm_nats` the node is convicted."""
    alarm_nats: float
    verdict: str
    """honest: its draws prove that it is honest. nothing: its draws show neither forgery nor honesty. coarse: it rounds
    more coarsely than its class (engine and precision) should, like other nodes of the class. forged: it is
    convicted."""
    reason: str
    striking: tuple[tuple[str, float], ...]
    """Rollouts with the strongest evidence against a convicted node, in nats each."""


@dataclass(slots=True)
class _Watched:
    """The rollouts of one node that were judged so far: either those that the run uses, or the dropped ones."""

    standing: Standing
    rollouts: int = 0
    all_shown: Evidence = NO_EVIDENCE
    farthest: float = 0.0
    highest: float = 0.0
    reason: str = ""
    striking: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, order=True)
class _Far:
    """A token whose random number lies far outside the interval that draws the token. The order of this class puts the
    most probable token first."""

    improbability: float
    rollout_id: str
    token: int
    nats: float
    node: str
    is_used: bool
    numerics: str

    @property
    def chance(self) -> float:
        return 1.0 / self.improbability


class DrawCheck:
    """Checks the draws of rollouts, which must come in the bundle's order. `adapters` are the policy versions in the
    bundle."""

    def __init__(
        self,
        examiner: Examiner,
        *,
        temperature: float,
        classes: Mapping[str, NumericsClass],
        adapters: Mapping[int, Path],
        bounds: SamplingBounds,
        discrepancies: Discrepancies,
    ) -> None:
        """`bounds`: limits of the run's completions."""
        self._examiner = examiner
        self._classes = classes
        self._adapters = adapters
        self._bounds = bounds
        self._discrepancies = discrepancies
        self._temperature = temperature
        self._numerics = Numerics(temperature)
        self._repeats = RepeatedTokens()
        self._watched: dict[tuple[str, bool], _Watched] = {}
        self._far: list[_Far] = []
        self.rollouts = 0
        self.tokens = 0
        self.seconds = 0.0
        """Seconds spent on recomputing draws, without the time of measurements."""
        self.measuring_s = 0.0
        self._refused: dict[str, int] = {}
        self._missing: set[int] = set()
        self._without_adapter = 0
        self.measured: list[str] = []
        """Texts that name each measured rounding, and the version with which it was measured."""

    def take(self, rollouts: Sequence[tuple[DrawnRollout, bool]], prompts: Sequence[NDArray[np.int32]]) -> None:
        """Recompute rollouts, each with True if the run uses it. Roundings are measured on `prompts`."""
        for start in range(0, len(rollouts), AT_ONCE):
            part = rollouts[start : start + AT_ONCE]
            for drawn in (drawn for drawn, is_used in part if is_used):
                self._check_bounds(drawn)
            used = {drawn.rollout_id: is_used for drawn, is_used in part}
            known = [drawn for drawn, _ in part if self._is_known(drawn)]
            began = time.monotonic()
            self._measure(known, prompts)
            measured = time.monotonic()
            for cases in self._examiner.recomputed(known, self._adapters):
                self._judge(cases, used)
            self.measuring_s += measured - began
            self.seconds += time.monotonic() - measured

    def _check_bounds(self, drawn: DrawnRollout) -> None:
        """Report a completion that the hub must have refused or cut elsewhere, by the run's settings."""
        try:
            check_payload(drawn, self._bounds)
        except RemoteProtocolError as error:
            self._discrepancies.add(DiscrepancyKind.DRAW, f"rollout {drawn.rollout_id}", error.brief)

    def _is_known(self, drawn: DrawnRollout) -> bool:
        missing = {span.policy_version for span in drawn.spans if span.policy_version} - self._adapters.keys()
        self._missing |= missing
        self._without_adapter += bool(missing)
        return not missing

    @property
    def refused(self) -> dict[str, int]:
        """Return the number of rollouts that could not be recomputed, by reason."""
        if not self._missing:
            return self._refused
        first, last = min(self._missing), max(self._missing)
        those = f"{first}" if first == last else f"{first} to {last}, {len(self._missing)} of them"
        return {**self._refused, f"the bundle lacks the adapters of version {those}": self._without_adapter}

    def _refuse(self, why: str) -> None:
        self._refused[why] = self._refused.get(why, 0) + 1

    def _measure(self, rollouts: Sequence[DrawnRollout], prompts: Sequence[NDArray[np.int32]]) -> None:
        """If a measurement is due, measure the rounding errors of these rollouts' nodes, with the newest version among
        the rollouts."""
        spans = [span for drawn in rollouts for span in drawn.spans]
        if not spans:
            return
        version = max(span.policy_version for span in spans)
        for rounding in sorted({self._class_of(span.node_id).rounding for span in spans}):
            if not self._numerics.is_due(rounding, version):
                continue
            answer = self._examiner.measure(rounding, version, self._adapters, prompts)
            if "evidence" in answer:
                self._numerics.measured(rounding, unpack_evidence(answer["evidence"]))
                self.measured.append(f"{rounding} with version {version}")
            else:
                self._numerics.not_measured(rounding, version)

    def _class_of(self, node: str) -> NumericsClass:
        return self._classes.get(node, NumericsClass())

    def _judge(self, cases: Sequence[RecomputedRollout], used: Mapping[str, bool]) -> None:
        told = [case for case in cases if not case.cannot]
        for case in cases:
            if case.cannot:
                self._refuse(case.cannot)
        for case, shown in zip(
            told, evidence_of(told, temperature=self._temperature, repeats=self._repeats), strict=True
        ):
            drawn, is_used = case.drawn, used[case.drawn.rollout_id]
            self.rollouts += 1
            self.tokens += len(drawn.completion_ids)
            outside_T = _outside(case)
            end = 0
            for span, evidence in zip(drawn.spans, shown, strict=True):
                of_span = outside_T[end : end + span.num_tokens]
                watched = self._watch(span.node_id, is_used=is_used)
                honest = self._take(watched, evidence, drawn.rollout_id, is_used=is_used)
                self._note_far(watched, honest, of_span, first=end, drawn=drawn, is_used=is_used)
                end += span.num_tokens

    def _watch(self, node: str, *, is_used: bool) -> _Watched:
        watched = self._watched.get((node, is_used))
        if watched is None:
            numerics = self._numerics.known(self._class_of(node))
            watched = self._watched[node, is_used] = _Watched(Standing(node, numerics=numerics))
        return watched

    def _take(self, watched: _Watched, evidence: Evidence, rollout_id: str, *, is_used: bool) -> Honest:
        """Judge a node by one more rollout, as `echo_hub.core.trust.trust` does. Return the rounding scales with which
        it was judged."""
        standing = watched.standing
        honest = self._numerics.honest(standing.numerics, without=standing.taught, shown=standing.recent)
        sums = judged(standing.sums, evidence, standing.recent, honest, _ALARM)
        standing.weigh(sums, evidence)
        standing.show(evidence)
        watched.rollouts += 1
        watched.all_shown += evidence.counts
        watched.highest = max(watched.highest, *standing.sums)
        own = max(weigh(evidence, honest)[: Alternative.SHOPPED])
        if own >= STRIKING:
            keep = heappush if len(watched.striking) < NAMED else heappushpop
            keep(watched.striking, (own, rollout_id))
        if max(standing.sums) >= _ALARM:
            watched.reason = watched.reason or what_is_wrong(standing)
        elif not watched.reason and is_used:
            standing.proof = proof_added(standing.proof, evidence, honest)
            if standing.proof <= log(_MISS) and evidence.num_claims:
                standing.taught += evidence
                self._numerics.learn(standing.numerics, evidence)
        return honest

    def _note_far(
        self,
        watched: _Watched,
        honest: Honest,
        outside_T: NDArray[np.float64],
        *,
        first: int,
        drawn: DrawnRollout,
        is_used: bool,
    ) -> None:
        token = int(outside_T.argmax())
        nats = float(outside_T[token])
        watched.farthest = max(watched.farthest, nats)
        chance = chance_of_distance(nats, min(honest.draws + honest.tolerance, NUM_SCALES - 1))
        if chance >= FALSE_NAMES:
            return
        far = _Far(
            improbability=1.0 / chance,
            rollout_id=drawn.rollout_id,
            token=first + token,
            nats=nats,
            node=watched.standing.node_id,
            is_used=is_used,
            numerics=str(watched.standing.numerics),
        )
        if len(self._far) < MOST_FAR:
            heappush(self._far, far)
        else:
            heappushpop(self._far, far)

    def end(self) -> list[NodeVerdict]:
        """Report the forgeries among the rollouts that the run uses. Return the verdicts about all nodes."""
        verdicts = [self._verdict(node, is_used) for node, is_used in sorted(self._watched)]
        for one in verdicts:
            if one.verdict == "forged" and one.is_used:
                named = ", ".join(f"{rollout_id} ({nats:.1f} nats)" for rollout_id, nats in one.striking)
                text = one.reason + (f" Most clearly: {named}." if named else "")
                self._discrepancies.add(DiscrepancyKind.DRAW, f"node {one.node}", text)
        for far in sorted(self._far, reverse=True):
            if far.is_used and far.chance * self.tokens < FALSE_NAMES:
                text = (
                    f"token {far.token} lies {far.nats:.2f} nats outside of the interval that draws it: an honest "
                    f"engine of class {far.numerics} does that once in {far.improbability:.1e} tokens (node {far.node})"
                )
                self._discrepancies.add(DiscrepancyKind.DRAW, f"rollout {far.rollout_id}", text)
        return verdicts

    def _verdict(self, node: str, is_used: bool) -> NodeVerdict:
        watched = self._watched[node, is_used]
        standing, shown = watched.standing, watched.all_shown
        verdict = "nothing"
        if watched.reason:
            verdict = "coarse" if self._is_class_wide(standing) else "forged"
        elif standing.proof <= log(_MISS):
            verdict = "honest"
        return NodeVerdict(
            node=node,
            is_used=is_used,
            numerics=str(standing.numerics),
            rollouts=watched.rollouts,
            tokens=shown.num_tokens,
            outside=sum(shown.draws[1:]),
            far=shown.draws[len(DRAW_EDGES)],
            farthest_nats=watched.farthest,
            nats=watched.highest,
            alarm_nats=_ALARM,
            verdict=verdict,
            reason=watched.reason,
            striking=tuple((rollout_id, nats) for nats, rollout_id in sorted(watched.striking, reverse=True)),
        )

    def _is_class_wide(self, accused: Standing) -> bool:
        """Return True if several nodes of the class round as coarsely as the accused node."""
        others = [
            watched.standing
            for (_, is_used), watched in self._watched.items()
            if is_used and watched.standing is not accused and watched.standing.numerics == accused.numerics
        ]
        recent = [one.recent for one in (accused, *others) if one.recent.num_tokens >= LEAST_TOKENS]
        return accused.recent.num_tokens >= LEAST_TOKENS and bool(self._numerics.class_wide(accused.numerics, recent))


def _outside(case: RecomputedRollout) -> NDArray[np.float64]:
    """Return how far each token's random number lies outside the interval that draws it, in nats [T].

    For greedy tokens, return the gap to the log-probability of the likeliest token.
    """
    below_T: NDArray[np.float64] = case.found_2T[0]
    logprobs_T: NDArray[np.float64] = case.found_2T[1]
    if case.drawn.is_greedy:
        return below_T
    return nats_outside(below_T, logprobs_T, uniforms_of([case.drawn]))
