"""What the verifier measures for honest engines of each precision, the gain of a node that exploits the verifier's
tolerance (`shopping`), and the cost of the check.

A short real run of the built-in model makes the versions; every sampler claims the same version. A token is drawn with
a random number u, uniform in [0, 1). Its *distance* is the gap, in nats of log-odds, between u and the interval of u in
which that version draws the token. Its *claim* is off by the difference between claimed and true log-odds, in nats. "u
0.2" is the share of tokens with a distance above 0.2, "claim 0.2" the share of tokens whose claim is off by more than
0.2 nats, "kl" the divergence per token. Cost is processor time, so that other work on the machine does not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.engine import lacks
from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.honesty import shopping
from benchmarks.honesty.samplers import EXACT, GROUPS, HONEST, Rollouts, ShortRun, as_drawn, opened
from echo_hub.core.trust.evidence import CLAIM_EDGES, DRAW_EDGES, NO_EVIDENCE
from echo_hub.learner.policy import Policy
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.verify.drawn import unpack_spans
from echo_hub.verify.worker import Examiner

DESCRIPTION: Final = "Draws and claims of honest samplers, as the verifier measures them, and the cost of the verifier"
HONEST_GROUPS: Final = 1_250
"""Number of groups for each class of honest engines; together 10,000 rollouts."""
SHOPPED_GROUPS: Final = 250
COST: Final = "cost"
COST_REPEATS: Final = 5
KEPT: Final = 4


def honest_case(name: str) -> str:
    return f"honest, {name}"


def plan() -> list[Planned]:
    honest = [
        Planned(name=honest_case(name), seconds=60, lacks=lacks(engine.backend, engine.precision))
        for name, engine in HONEST.items()
    ]
    shopped = [Planned(name=shopping.case(precision), seconds=120) for precision in shopping.CLAIMED]
    return [*honest, *shopped, Planned(name=COST, seconds=60)]


def measure(seed: int, progress: Progress) -> Measurement:
    rows: list[dict[str, Any]] = []
    headline: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="echo-honesty-") as directory:
        scratch = Path(directory)
        run = ShortRun(scratch / "run", seed)
        run.train()
        examiner = Examiner(Policy.load(run.settings), run.settings, kept=KEPT)

        for number, (name, engine) in enumerate(HONEST.items()):
            case = honest_case(name)
            if progress.wants(case):
                with opened(run, engine, scratch / str(number)) as sampler:
                    rollouts = sampler.draw(run.asked(case, HONEST_GROUPS))
                figures = _figures(examiner, rollouts, run.adapters)
                rows.append({"case": case, **figures})
                progress.done(case, {name: figures[name] for name in ("tokens", "u 0.2", "claim 0.2")})
        shopped: list[dict[str, Any]] = []
        for precision in shopping.CLAIMED:
            if progress.wants(shopping.case(precision)):
                found = shopping.measure(run, examiner, precision, SHOPPED_GROUPS)
                shopped += found
                progress.done(shopping.case(precision), shopping.headline(found))
        rows += shopped
        headline |= shopping.headline(shopped) if shopped else {}
        if progress.wants(COST):
            headline |= _cost(run, scratch)
            progress.done(COST, headline)
    return Measurement(
        headline={**_extremes(rows), **headline},
        rows=rows,
        conditions={"draw_edges": DRAW_EDGES, "claim_edges": CLAIM_EDGES},
    )


def _figures(examiner: Examiner, rollouts: Rollouts, adapters: Mapping[int, Path]) -> dict[str, Any]:
    drawn = as_drawn(rollouts)
    total = NO_EVIDENCE
    for frame in examiner.examine(drawn, adapters):
        for _, shown in unpack_spans(frame["spans"]):
            total += shown
    return {
        "rollouts": len(drawn),
        "tokens": total.num_tokens,
        **{f"u {edge:g}": share for edge, share in zip(DRAW_EDGES, _beyond(total.draws), strict=True)},
        **{f"claim {edge:g}": share for edge, share in zip(CLAIM_EDGES, _beyond(total.claims), strict=True)},
        "kl": total.mismatch_kl / total.num_tokens,
    }


def _beyond(counts: Sequence[int]) -> list[float]:
    return [sum(counts[place:]) / sum(counts) for place in range(1, len(counts))]


def _extremes(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    honest = [row for row in rows if row["case"].startswith("honest")]
    return {"honest_u_beyond_02_worst": max(row["u 0.2"] for row in honest)} if honest else {}


def _cost(run: ShortRun, scratch: Path) -> dict[str, float]:
    """Return the processor time of checking one step's rollouts, and that of training on them, measured alternately."""
    asked = run.asked("cost", GROUPS)
    with opened(run, EXACT, scratch / "cost") as sampler:
        rollouts = sampler.draw(asked)
    policy = Policy.load(run.settings)
    optimizer = make_optimizer(policy, run.settings.training)
    examiner = Examiner(Policy.load(run.settings), run.settings, kept=KEPT)
    groups, drawn = run.for_training(asked, [rollout for _, rollout in rollouts]), as_drawn(rollouts)
    spent = {"verify": 0.0, "train": 0.0}
    computed = 0.0
    for repeat in range(1 + COST_REPEATS):
        began = time.process_time()
        list(examiner.examine(drawn, run.adapters))
        checked = time.process_time()
        metrics = train_step(policy, optimizer, groups, run.settings)
        if repeat:  # The first pair does not count: it also allocates memory and chooses kernels.
            spent["verify"] += checked - began
            spent["train"] += time.process_time() - checked
            computed += metrics["computed_tokens"]
    tokens = COST_REPEATS * sum(len(rollout.completion_ids) for _, rollout in rollouts)
    return {
        "verified_tokens_per_cpu_s": tokens / spent["verify"],
        "trained_tokens_per_cpu_s": computed / spent["train"],
        "cost_of_checking_all": spent["verify"] / spent["train"],
    }
