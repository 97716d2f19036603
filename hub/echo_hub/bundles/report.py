"""Format a check's result as terminal lines or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from echo_hub.bundles.checking import CheckedBundle
from echo_hub.bundles.discrepancies import DiscrepancyKind
from echo_hub.bundles.draws import NodeVerdict
from echo_hub.bundles.repeating import RepeatedStep
from echo_shared.wire.messages.fields import printable_line

SHOWN: Final = 20
"""Largest number of printed discrepancies of one kind, and of printed nodes. The option --json prints all."""
_WORDS: Final = {
    "honest": "follow from the seeds",
    "nothing": "nothing speaks against them, too few to be sure",
    "coarse": "coarser rounding than its class, like other nodes of it",
    "forged": "DO NOT FOLLOW",
}
PROVES_NOT: Final = (
    "that the hub recorded every rollout that came in: nodes can look up their receipts' ids in the bundle",
    "that a node had the precision that the hub recorded for it: a coarser one forgives more",
    "who a node is, or that two nodes belong to two people",
    "rollouts whose tokens or adapters the hub has deleted, and steps that were not repeated",
    "samples for tenants, which no bundle holds",
)


def lines_of(found: CheckedBundle) -> Iterator[str]:
    """Yield the report about a check, line by line. Names in a bundle can neither control a terminal nor add lines."""
    yield from map(printable_line, _lines(found))


def _lines(found: CheckedBundle) -> Iterator[str]:
    yield f"Run {found.run_name} ({found.run_id}), bundled {found.made_at}"
    yield f"Signed by the key {found.key}"
    if found.discrepancies.counts[DiscrepancyKind.FILE]:
        yield "The files are not those that the hub signed, so nothing else was checked."
    else:
        yield from _counts(found)
        yield from _nodes(found)
        yield from _rewards(found)
        yield from _step(found.step)
    yield ""
    yield from _discrepancies(found)
    if not found.discrepancies.counts[DiscrepancyKind.FILE]:
        yield ""
        yield "What this shows, as far as nothing else is named above:"
        yield from (f"  - {text}" for text in _shown(found))
        yield "What it does not show:"
        yield from (f"  - {text}" for text in PROVES_NOT)


def _shown(found: CheckedBundle) -> Iterator[str]:
    yield "the key above has signed this bundle"
    if found.checked_rollouts:
        yield (
            "the checked tokens follow from the recorded seeds under the adapters in the bundle, within the rounding "
            "of the precision that the hub recorded for each node"
        )
    if found.rewards is not None and found.rewards.rewards:
        yield "the recorded rewards follow from the tokens"
    if found.step is not None and not found.step.cannot:
        yield "the repeated step follows from its batch and the checkpoint before it"


def _counts(found: CheckedBundle) -> Iterator[str]:
    yield f"Records: {found.rollouts} leases of {found.groups} groups, {found.steps} steps"
    if found.retired:
        yield f"  {found.retired} older rollouts are not in the bundle: the hub has retired them."
    if found.retired_steps:
        yield f"  The records of {found.retired_steps} steps were not compared: their rollouts are retired."
    if found.without_tokens:
        yield f"  {found.without_tokens} received rollouts cannot be checked: their tokens are deleted."
    for why, number in sorted(found.refused.items()):
        yield f"  {number} rollouts could not be computed: {why}."
    share = "all" if found.share >= 1 else f"a random share of {found.share:g}, --seed {found.seed}"
    speed = found.checked_tokens / found.draws_s if found.draws_s else 0.0
    yield (
        f"Draws: {found.checked_rollouts} rollouts ({share}), {found.checked_tokens} tokens, "
        f"{speed:.0f} tokens a second"
    )


def _nodes(found: CheckedBundle) -> Iterator[str]:
    if not found.nodes:
        return
    width = max(len(one.numerics) for one in found.nodes)
    yield (
        f"  {'Node':<18}{'Engine':<{width + 2}}{'Rollouts':>9}{'Tokens':>9}{'Outside':>9}{'> 1 nat':>9}"
        f"{'Farthest':>10}{'Against':>9}  Draws"
    )
    ordered = sorted(found.nodes, key=lambda one: (one.verdict != "forged", not one.is_used, -one.tokens))
    for one in ordered[:SHOWN]:
        yield _node(one, width)
    if len(ordered) > SHOWN:
        yield f"  ... and {len(ordered) - SHOWN} more; --json has all."
    yield f"  Against: evidence in nats; {ordered[0].alarm_nats:.1f} convict a node. Farthest: nats of log-odds."


def _node(one: NodeVerdict, width: int) -> str:
    dropped = "" if one.is_used else " (dropped by the hub)"
    return (
        f"  {one.node:<18}{one.numerics:<{width + 2}}{one.rollouts:>9}{one.tokens:>9}{one.outside:>9}{one.far:>9}"
        f"{one.farthest_nats:>10.3f}{one.nats:>9.1f}  {_WORDS[one.verdict]}{dropped}"
    )


def _rewards(found: CheckedBundle) -> Iterator[str]:
    counts = found.rewards
    if counts is not None:
        answers = f", {counts.answers} answers of the environment" if counts.answers else ""
        yield f"Rewards: {counts.rewards} rewards{answers} and {counts.prompts} prompts recomputed"
        if counts.failed:
            yield f"  The scorer failed here on {counts.failed} rollouts, the last: {counts.last_failure}"
    if found.not_scored:
        yield f"Rewards not recomputed: {found.not_scored}"


def _step(step: RepeatedStep | None) -> Iterator[str]:
    if step is None:
        return
    if step.cannot:
        yield f"Step {step.step} could not be repeated: {step.cannot}"
    elif step.is_same:
        yield f"Step {step.step} repeated: all {step.weights} weights of version {step.step} are equal to the bit"
    else:
        yield (
            f"Step {step.step} repeated: {step.changed} of {step.weights} weights of version {step.step} differ, "
            f"together by {step.share:.2g} of the step's own change, one by {step.largest:.3g} at most"
        )
        if not step.is_same_machine:
            yield "  The bundle was made on another kind of machine or with other libraries, which round otherwise."
    if not step.cannot and not step.is_checkpoint_compared:
        yield f"  The checkpoint before it was not compared: the bundle lacks version {step.step - 1}."
    if step.loss is not None and step.recorded_loss is not None:
        yield f"  Loss {step.loss:.9g}, recorded {step.recorded_loss:.9g}"


def _discrepancies(found: CheckedBundle) -> Iterator[str]:
    if not found.discrepancies.total:
        yield "Nothing was found that is not as the bundle says."
        return
    yield f"FOUND: {found.discrepancies.total} things are not as the bundle says."
    for kind in DiscrepancyKind:
        kept = found.discrepancies.of(kind)
        for one in kept[:SHOWN]:
            yield f"  [{kind}] {one}"
        if found.discrepancies.counts[kind] > SHOWN:
            yield f"  [{kind}] ... and {found.discrepancies.counts[kind] - min(SHOWN, len(kept))} more"


def as_json(found: CheckedBundle) -> dict[str, Any]:
    """Return all results of a check, as JSON values."""
    return {
        "run_name": found.run_name,
        "run_id": found.run_id,
        "made_at": found.made_at,
        "key": found.key,
        "seed": found.seed,
        "share": found.share,
        "groups": found.groups,
        "rollouts": found.rollouts,
        "steps": found.steps,
        "states": found.states,
        "retired": found.retired,
        "retired_steps": found.retired_steps,
        "without_tokens": found.without_tokens,
        "checked_rollouts": found.checked_rollouts,
        "checked_tokens": found.checked_tokens,
        "draws_s": found.draws_s,
        "measuring_s": found.measuring_s,
        "rewards_s": found.rewards_s,
        "measured": found.measured,
        "refused": found.refused,
        "nodes": [asdict(one) for one in found.nodes],
        "rewards": None if found.rewards is None else asdict(found.rewards),
        "not_scored": found.not_scored,
        "step": None if found.step is None else asdict(found.step),
        "found": {kind: number for kind, number in found.discrepancies.counts.items() if number},
        "discrepancies": [asdict(one) for one in found.discrepancies],
    }
