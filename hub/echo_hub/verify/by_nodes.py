"""Send rollouts to nodes for checking, and turn their answers into evidence about the nodes that drew the rollouts.

The checking node gets only tokens and policy versions. The claimed log-probabilities and the uniforms (random numbers
of the draws) are read from the store after its answer. Until then, memory holds only rollout ids, at most `MOST_OUT`
per node.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import SendCheck
from echo_hub.core.accounting.events import CheckAbandoned, CheckReturned
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.pairs import PeerFinding
from echo_hub.driving.event_queue import EventQueue
from echo_hub.net.live_nodes import NodeSender
from echo_hub.verify.drawn import DrawnRollout
from echo_hub.verify.repeats import RepeatedTokens
from echo_hub.verify.verifier import CheckedRollouts
from echo_shared.sampling import draws
from echo_shared.sampling.version_spans import Spans, grown
from echo_shared.wire.messages import MAX_VERSION_SPANS, CheckLease, CheckResult
from echo_shared.wire.messages.fields import MAX_TOKENS

MOST_OUT: Final = 64
"""Maximum number of unanswered checks of one node. Sending one more check discards the oldest, whose answer is then
ignored."""


class NodeChecks:
    """Checks that nodes make of other nodes' rollouts. `rollouts`: reads committed rollouts with their claims (reported
    log-probabilities). `temperature`: the run's sampling temperature."""

    def __init__(
        self, *, rollouts: CheckedRollouts, connections: NodeSender, queue: EventQueue, temperature: float
    ) -> None:
        self._rollouts = rollouts
        self._connections = connections
        self._queue = queue
        self._temperature = temperature
        self._repeats = RepeatedTokens()
        self._waiting: asyncio.Queue[SendCheck] = asyncio.Queue()
        self._out: dict[str, OrderedDict[str, None]] = {}

    def submit(self, action: SendCheck) -> None:
        """Queue a check without waiting. The queue needs no bound, because the coordinator limits the number of
        checks."""
        self._waiting.put_nowait(action)

    async def run(self) -> None:
        while True:
            actions = [await self._waiting.get()]
            while not self._waiting.empty():
                actions.append(self._waiting.get_nowait())
            found = await self._rollouts.load([action.rollout_id for action in actions])
            for action in actions:
                drawn = found.get(action.rollout_id)
                lease = None if drawn is None or isinstance(drawn, str) else self._lease(drawn, action.deadline_s)
                if lease is None:
                    await self._queue.put(CheckAbandoned(rollout_id=action.rollout_id))
                    continue
                out = self._out.setdefault(action.node_id, OrderedDict())
                out[action.rollout_id] = None
                if len(out) > MOST_OUT:
                    out.popitem(last=False)
                self._connections.send(action.node_id, lease)

    def _lease(self, drawn: DrawnRollout, deadline_s: float) -> CheckLease | None:
        """Return the message to the checking node; None for an inconsistent rollout, or if the message would be too
        large.
        """
        count = len(drawn.completion_ids)
        versions: Spans = ()
        for span in drawn.spans:
            versions = grown(versions, span.policy_version, span.num_tokens)
        sizes = (count, len(drawn.behavior_logprobs), sum(span.num_tokens for span in versions))
        if not count or not len(drawn.prompt_ids) or len(set(sizes)) > 1:
            return None
        if len(drawn.prompt_ids) > MAX_TOKENS or len(versions) > MAX_VERSION_SPANS:
            return None
        return CheckLease(
            rollout_id=drawn.rollout_id,
            prompt_ids=drawn.prompt_ids,
            completion_ids=drawn.completion_ids,
            versions=versions,
            temperature=self._temperature if drawn.temperature is None else drawn.temperature,
            deadline_s=deadline_s,
        )

    async def answered(self, node_id: str, result: CheckResult) -> None:
        """Put the evidence of a node's answer into the event queue. An answer without an open check is ignored."""
        out = self._out.get(node_id, OrderedDict())
        if result.rollout_id not in out:
            return
        del out[result.rollout_id]
        found = await self._rollouts.load([result.rollout_id]) if len(result.below) else {}
        drawn = found.get(result.rollout_id)
        is_whole = isinstance(drawn, DrawnRollout) and len(drawn.completion_ids) == len(result.below)
        finding = None
        if is_whole and isinstance(drawn, DrawnRollout):
            warmth = 1.0 if drawn.temperature is None else drawn.temperature / self._temperature
            finding = await asyncio.to_thread(finding_of, drawn, result, self._repeats, warmth=warmth)
        await self._queue.put(CheckReturned(node_id=node_id, rollout_id=result.rollout_id, finding=finding))

    def left(self, node_id: str) -> None:
        self._out.pop(node_id, None)


def finding_of(
    drawn: DrawnRollout, result: CheckResult, repeats: RepeatedTokens, *, warmth: float = 1.0
) -> PeerFinding:
    """Return what a node's answer shows about each node that drew a part of the rollout. `warmth`: temperature of the
    rollout, divided by the run's."""
    if drawn.is_greedy:
        return _greedy_finding(drawn, result, repeats.weights(drawn).draws, warmth=warmth)
    u = draws.uniforms(drawn.seed, drawn.index, len(drawn.completion_ids))
    below, logprobs = result.below.astype(np.float64).clip(0.0, 1.0), result.logprobs.astype(np.float64).clip(max=0.0)
    counts = [span.num_tokens for span in drawn.spans]
    warmth_N = np.full(len(below), warmth)
    weights = repeats.weights(drawn)
    shown = Evidence.of_spans(
        below,
        logprobs,
        u,
        drawn.behavior_logprobs,
        counts,
        warmth_N=warmth_N,
        draw_weights_N=weights.draws,
        claim_weights_N=weights.claims,
    )
    return PeerFinding(
        spans=tuple(zip((span.node_id for span in drawn.spans), shown, strict=True)),
        below=below,
        logprobs=logprobs,
        num_tokens=len(drawn.prompt_ids) + len(drawn.completion_ids),
        warmth=warmth,
    )


def _greedy_finding(
    drawn: DrawnRollout, result: CheckResult, weights_N: NDArray[np.float64], *, warmth: float
) -> PeerFinding:
    """Return what a node's answer shows about greedy choices. At a temperature near 0, a token's log-probability is its
    gap to the likeliest token, divided by the temperature."""
    gaps = (-warmth * result.logprobs.astype(np.float64)).clip(min=0.0)
    nothing = np.zeros(len(gaps))
    counts = [span.num_tokens for span in drawn.spans]
    greedy_N = np.ones(len(gaps), np.bool_)
    shown = Evidence.of_spans(gaps, nothing, nothing, nothing, counts, greedy_N=greedy_N, draw_weights_N=weights_N)
    return PeerFinding(
        spans=tuple(zip((span.node_id for span in drawn.spans), shown, strict=True)),
        below=gaps,
        logprobs=nothing,
        num_tokens=len(drawn.prompt_ids) + len(drawn.completion_ids),
        warmth=warmth,
        is_greedy=True,
    )
