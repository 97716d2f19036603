"""A table for each claim: the paper's result, its scale, and the same comparison with Echo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Any, Final

from benchmarks.harness import real_model
from benchmarks.harness.site import Settings
from benchmarks.learning.virtual_run import stale
from benchmarks.papers.runs import ASYNC, COLOCATED, GROUPS, MOST_SEEDS, SEEDS, SEQUENTIAL, Case, Found, Ran, Wanted
from echo_hub.learner.sft_plan import SftSettings
from echo_hub.run.packaged_base import SMOLLM2, gguf_file

Headline = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    source: str
    """The paper's arXiv number, and the section with the claim."""
    scale: str
    reports: Mapping[Case, str]
    """For each case, the result that the paper reports."""
    headline: Callable[[Found], Headline]
    columns: Callable[[Case, Sequence[Ran]], Mapping[str, Any]] = lambda case, ran: {}
    seeds: int = SEEDS
    lacks: str = ""
    """Why this machine cannot measure the table; "" if it can."""

    @property
    def wanted(self) -> Wanted:
        return list(self.reports), self.seeds

    def rows(self, found: Found) -> list[dict[str, Any]]:
        return [
            {
                "table": self.name,
                "case": case.name,
                "seeds": len(found[case]),
                "before": fmean(one.points[0].accuracy for one in found[case]),
                "accuracy": accuracy(found[case]),
                "lowest": min(one.accuracy for one in found[case]),
                "highest": max(one.accuracy for one in found[case]),
                **self.columns(case, found[case]),
                "paper": reports,
                "paper_scale": self.scale,
                "source": self.source,
            }
            for case, reports in self.reports.items()
        ]


def accuracy(ran: Sequence[Ran]) -> float:
    """Return the held-out accuracy after the last step, as the mean over all seeds."""
    return fmean(one.accuracy for one in ran)


# Echo: sampling on other machines costs no reward.

ECHO: Final = "arXiv 2508.05387"
TRL: Final = Case(name="TRL's GRPOTrainer", runner="trl", seconds=12)
TRL_SAME_DRAWS: Final = Case(name="TRL's GRPOTrainer, by the same draws", runner="trl", same_draws=True, seconds=12)
TRAINED: Final = Case(
    name="builtin:tiny, trained",
    settings={"training": {"steps": 60, "groups_per_step": 32}},
    evaluate_every=20,
    seconds=21,
)
REAL: Final[dict[str, Mapping[str, Any]]] = {
    "model": {"base": str(gguf_file(SMOLLM2) or "")},
    "task": {"name": "sums", "prompt_suffix": " Answer with the number only."},
    "sampling": {"max_tokens": 16},
    "training": {"steps": 20, "groups_per_step": 4, "group_size": 16, "learning_rate": 2e-4},
    "evaluation": {"problems": 128},
}
"""Settings of `echo-hub demo --base smollm2`, with fewer steps and held-out problems."""
REAL_COLOCATED: Final = Case(name="SmolLM2-135M-Instruct, co-located", settings=REAL, evaluate_every=20, seconds=400)
REAL_ASYNC: Final = Case(
    name="SmolLM2-135M-Instruct, async, S = 2", settings=stale(2, **REAL), evaluate_every=20, seconds=400
)
FAR: Final = {
    milliseconds: Case(name=f"nodes {milliseconds} ms away", settings=stale(2), delay_s=milliseconds / 1000)
    for milliseconds in (40, 150, 300)
}
QUANTISED: Final = {
    precision: Case(name=f"fleet in {precision}", settings=stale(2), precision=precision)
    for precision in ("q8_0", "q4_k_m")
}
SMALL: Final[Settings] = {"model": {"base": "builtin:small"}, "evaluation": {"problems": 256}}
LARGE: Final = Case(
    name="builtin:small as it is, with working",
    settings={
        **SMALL,
        "task": {"name": "worked", "options": {"shortest": 3, "longest": 3}},
        "sampling": {"max_tokens": 160},
    },
    runner="untrained",
    seconds=4,
)
"""Three-digit sums, which are the task of all cases of `builtin:tiny`, with a model that has four times as many
weights.
"""
KNIGHTS: Final[dict[str, Mapping[str, Any]]] = {
    **SMALL,
    "task": {
        "name": "reasoning-gym:knights_knaves",
        "options": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
    },
    "sampling": {"max_tokens": 160},
    "training": {"steps": 20, "groups_per_step": 12, "learning_rate": 5e-4},
}
DEMONSTRATED: Final = Case(
    name="builtin:small, fine-tuned",
    settings=KNIGHTS,
    runner="finetuned",
    demonstrations=1_000,
    sft=SftSettings(epochs=1, batch_tokens=2_048, learning_rate=2e-3, heldout=0.03),
    seconds=100,
)
TRAINED_KNIGHTS: Final = Case(
    name="builtin:small, fine-tuned, then trained", settings=KNIGHTS, start=DEMONSTRATED, seconds=120
)
SOKOBAN: Final = Case(
    name="builtin:small, four rounds",
    settings={
        **SMALL,
        "task": {"name": "environment:sokoban", "options": {"size": 4, "inner_walls": 2, "boxes": 1}},
        "sampling": {"max_tokens": 16},
        "training": {"steps": 20},
    },
    runner="episodes",
    seconds=200,
)


def _trl_gaps(found: Found) -> Headline:
    """Return, for each kind of draws, the largest distance between TRL's mean curve and the hub's. With the same draws
    the distance shows how the trainers differ; with TRL's own draws it includes chance.
    """

    def mean_curve(case: Case) -> list[float]:
        points = zip(*(one.points for one in found[case]), strict=True)
        return [fmean(point.accuracy for point in place) for place in points]

    def gap(case: Case) -> float:
        return max(abs(left - right) for left, right in zip(mean_curve(COLOCATED), mean_curve(case), strict=True))

    return {"trl_curve_gap": gap(TRL_SAME_DRAWS), "trl_own_draws_gap": gap(TRL)}


PARITY: Final = Table(
    name="Echo: parity",
    source=f"{ECHO}, section on experiments",
    scale="Qwen3-4B, 7B and 32B; Sokoban, mathematics, Knights & Knaves",
    reports={
        COLOCATED: "the reference: verl, co-located on one cluster",
        SEQUENTIAL: "same convergence and final reward",
        ASYNC: "same convergence and final reward",
    },
    headline=lambda found: {
        "parity_gap": accuracy(found[COLOCATED]) - min(accuracy(found[SEQUENTIAL]), accuracy(found[ASYNC]))
    },
)
REAL_PARITY: Final = Table(
    name="Echo: parity on a language model",
    source=f"{ECHO}, section on experiments",
    scale="Qwen3-4B, 7B and 32B; Sokoban, mathematics, Knights & Knaves",
    reports={
        REAL_COLOCATED: "the reference: verl, co-located on one cluster",
        REAL_ASYNC: "same convergence and final reward",
    },
    headline=lambda found: {"real_parity_gap": accuracy(found[REAL_COLOCATED]) - accuracy(found[REAL_ASYNC])},
    columns=lambda case, ran: {"mean_reward": mean_reward(ran)},
    seeds=1,
    lacks=real_model.lacks(),
)
TRL_CURVE: Final = Table(
    name="Echo: TRL's curve",
    source=ECHO,
    scale="verl there; TRL's GRPOTrainer here",
    reports={
        COLOCATED: "curves of Echo and of the co-located trainer lie on each other",
        TRL_SAME_DRAWS: "-",
        TRL: "-",
    },
    headline=_trl_gaps,
    seeds=MOST_SEEDS,
)
SMALL_AND_LARGE: Final = Table(
    name="Echo: small against four times larger",
    source=f"{ECHO}, Sokoban",
    scale="Qwen3-4B, trained, against Qwen3-32B as it is",
    reports={TRAINED: "the trained small model is ahead", LARGE: "-"},
    headline=lambda found: {"small_beats_4x_by": accuracy(found[TRAINED]) - accuracy(found[LARGE])},
)
DISTANCE: Final = Table(
    name="Echo: far nodes",
    source=f"{ECHO}, deployment",
    scale="inference swarm of consumer devices at other places, over wide-area links",
    reports=dict.fromkeys(FAR.values(), "sampling over wide-area links, no loss of reward"),
    headline=lambda found: {},
)
KNIGHTS_AND_KNAVES: Final = Table(
    name="Echo: Knights & Knaves",
    source=ECHO,
    scale="Qwen2.5-32B with LoRA, 2 to 8 people",
    reports={DEMONSTRATED: "-", TRAINED_KNIGHTS: "99 % and more"},
    headline=lambda found: {"knk_accuracy": accuracy(found[TRAINED_KNIGHTS])},
)
SOKOBAN_ROUNDS: Final = Table(
    name="Echo: Sokoban",
    source=ECHO,
    scale="Qwen3-4B, four rounds",
    reports={SOKOBAN: "21.8 to 34.0 %"},
    headline=lambda found: {"sokoban_gain": min(one.accuracy - one.points[0].accuracy for one in found[SOKOBAN])},
)
FLEET: Final = Table(
    name="Quantised fleet",
    source=f"{ECHO}, the inference swarm",
    scale="consumer devices; its engine samples in the trainer's own precision",
    reports={ASYNC: "float32", **dict.fromkeys(QUANTISED.values(), "-")},
    headline=lambda found: {
        "q8_fleet_gap": accuracy(found[ASYNC]) - accuracy(found[QUANTISED["q8_0"]]),
        "q4_fleet_gap": accuracy(found[ASYNC]) - accuracy(found[QUANTISED["q4_k_m"]]),
    },
)

# ECHO-2, LlamaRL, AReaL: the cost of stale rollouts, and corrections for it.

AIPO_11: Final = Case(name="AIPO, S = 11", settings=stale(11, objective={"name": "aipo"}))
TWO_SIDED: Final = {bound: Case(name=f"two-sided, S = {bound}", settings=stale(bound)) for bound in (3, 6, 11)}
PUBLISHED_TWELFTH: Final = Case(name="two-sided, S = 11, κ = 10", settings=stale(11, training={"publish_every": 10}))
UNCORRECTED_11: Final = Case(
    name="no correction, S = 11", settings=stale(11, objective={"name": "grpo", "old_policy": "proximal"})
)
ECHO_2: Final = Table(
    name="ECHO-2: staleness",
    source="arXiv 2602.02192, staleness ablation",
    scale="Qwen3-4B and 8B; GRPO, mathematics",
    reports={
        COLOCATED: "the reference",
        TWO_SIDED[3]: "no loss",
        TWO_SIDED[6]: "stable to here",
        TWO_SIDED[11]: "may break down",
        PUBLISHED_TWELFTH: "κ = S - 1, its own choice of the period of publication",
        AIPO_11: "-",
    },
    headline=lambda found: {
        "s11_gap_corrected": accuracy(found[COLOCATED])
        - max(accuracy(found[case]) for case in (TWO_SIDED[11], AIPO_11))
    },
)
LLAMARL: Final = Table(
    name="LlamaRL: AIPO",
    source="arXiv 2505.24034, AIPO",
    scale="Llama 3.1, 8B to 405B; mathematics",
    reports={
        AIPO_11: "asynchronous training as good as synchronous training",
        UNCORRECTED_11: "without off-policy corrections training may become unstable",
    },
    headline=lambda found: {"aipo_over_none": accuracy(found[AIPO_11]) - accuracy(found[UNCORRECTED_11])},
)
ETAS: Final = (0, 8, 16)
MINIBATCHES: Final = {"updates_per_step": 4}


def _areal(label: str, **objective: Any) -> dict[int, Case]:
    return {
        eta: Case(
            name=f"{label}, η = {eta}", settings=stale(eta, objective=objective, training=MINIBATCHES), seconds=13
        )
        for eta in ETAS
    }


_SAME: Final = {"aggregation": "token_mean", "advantage": "batch_std"}
DECOUPLED: Final = _areal("decoupled", name="decoupled_ppo")
RECOMPUTED: Final = _areal("naive, recomputed", name="grpo", old_policy="proximal", **_SAME)
BEHAVIOR: Final = _areal("naive, behaviour", name="grpo", **_SAME)
AIME24: Final = {"decoupled": {0: "42.0", 8: "41.0", 16: "38.7"}, "naive": {0: "42.0", 8: "35.7", 16: "35.8"}}
AREAL: Final = Table(
    name="AReaL: decoupled PPO",
    source="arXiv 2505.24298, table 2",
    scale="DeepSeek-R1-Distill-Qwen-1.5B, AIME24, in %",
    reports={
        cases[eta]: f"{AIME24[kind][eta]} ({kind})"
        for cases, kind in ((DECOUPLED, "decoupled"), (RECOMPUTED, "naive"), (BEHAVIOR, "naive"))
        for eta in ETAS
    },
    headline=lambda found: {
        "decoupled_over_naive_eta8": accuracy(found[DECOUPLED[8]]) - accuracy(found[RECOMPUTED[8]]),
        "decoupled_over_behavior_eta8": accuracy(found[DECOUPLED[8]]) - accuracy(found[BEHAVIOR[8]]),
    },
)

# Tables for Shuffle-R1, C3PO and ArCHer: which rollouts a step uses, and which tokens get the credit for a reward.

TARGET: Final = 0.8
"""Held-out accuracy up to which `steps_to` counts steps."""
UPDATES: Final = 4
"""Optimizer updates per step. Each update of Shuffle-R1 uses two of the step's eight sub-batches."""


def _of_updates(name: str, **objective: Any) -> Case:
    training = {"group_size": 16, "updates_per_step": UPDATES, "learning_rate": 2e-4}
    return Case(name=name, settings={"objective": objective, "training": training}, evaluate_every=5, seconds=12)


SHUFFLE_GRPO: Final = _of_updates(f"all of 16, {UPDATES} updates")
PAIRED: Final = _of_updates(f"pairs, of 16, {UPDATES} updates", selection="shuffle_r1")
SHUFFLED: Final = _of_updates(
    f"pairs, of 16, and batch shuffle, {UPDATES} updates", selection="shuffle_r1", shuffle_batches=8
)


def steps_to(case: Case, ran: Sequence[Ran]) -> float:
    """Return the mean number of steps to TARGET; infinite if a run never reaches it."""
    return fmean(one.steps_to(TARGET, evaluate_every=case.evaluate_every) for one in ran)


def finite(value: float) -> float | None:
    """Return the value, or None for infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


SHUFFLE_R1: Final = Table(
    name="Shuffle-R1: steps to target",
    source="arXiv 2508.05612",
    scale="Qwen2.5-VL-3B and 7B; geometry and mathematics with pictures",
    reports={SHUFFLE_GRPO: "GRPO", PAIRED: "-", SHUFFLED: "GRPO's accuracy in about half the steps"},
    headline=lambda found: {
        "shuffle_steps_ratio": finite(steps_to(SHUFFLED, found[SHUFFLED]) / steps_to(SHUFFLE_GRPO, found[SHUFFLE_GRPO]))
    },
    columns=lambda case, ran: {f"steps_to_{TARGET}": finite(steps_to(case, ran))},
    seeds=MOST_SEEDS,
)
BUDGET: Final = GROUPS * 8 * 4
NOT_BUDGETED: Final = Case(name="whole groups", settings={"objective": {"aggregation": "token_mean"}})
BUDGETED: Final = Case(
    name=f"{BUDGET} tokens a step", settings={"training": {"tokens_per_step": BUDGET, "groups_per_step": 2 * GROUPS}}
)


def variance(ran: Sequence[Ran]) -> float:
    """Return the variance of the gradient's norm over a run's steps, relative to the squared mean norm; the mean over
    all seeds.
    """
    norms = [[step["grad_norm"] for step in one.steps] for one in ran]
    return fmean(pvariance(of_one) / fmean(of_one) ** 2 for of_one in norms)


C3PO: Final = Table(
    name="Ring-lite: C3PO",
    source="arXiv 2506.14731, section on C3PO",
    scale="Ring-lite, 16.8B mixture of experts; mathematics and code",
    reports={NOT_BUDGETED: "gradient norms swing with the tokens of a step", BUDGETED: "stable gradient norms"},
    headline=lambda found: {"budget_variance_ratio": variance(found[BUDGETED]) / variance(found[NOT_BUDGETED])},
    columns=lambda case, ran: {"gradient_variance": variance(ran)},
)
GAME: Final[dict[str, Mapping[str, Any]]] = {
    "task": {"name": "environment:guess", "options": {"turns": 4}},
    "sampling": {"max_tokens": 1},
    "evaluation": {"problems": 16},
}
"""Settings of a guessing game with four turns. Only few games are held out, so the rewards in training are more precise
than the evaluation.
"""
BY: Final = {
    credit: Case(
        name=f"credit by {credit}",
        settings={**GAME, "training": {"credit": credit, "learning_rate": 1e-3}},
        runner="episodes",
        evaluate_every=40,
        seconds=9,
    )
    for credit in ("episode", "turn")
}


def mean_reward(ran: Sequence[Ran]) -> float:
    """Return the mean reward over all steps and seeds: a measure of how fast the reward rises."""
    return fmean(step["mean_reward"] for one in ran for step in one.steps)


TURN_CREDIT: Final = Table(
    name="ArCHer: credit by turn",
    source="arXiv 2402.19446, figures of sample efficiency",
    scale="GPT-2, 100 M and more; text games",
    reports={
        BY["episode"]: "policy gradient over whole episodes",
        BY["turn"]: "a critic of turns: about 100 times fewer samples",
    },
    headline=lambda found: {"turn_credit_gain": mean_reward(found[BY["turn"]]) - mean_reward(found[BY["episode"]])},
    columns=lambda case, ran: {"mean_reward": mean_reward(ran)},
)

TABLES: Final = (
    *(PARITY, AREAL, ECHO_2, LLAMARL, FLEET, TRL_CURVE, SHUFFLE_R1, C3PO, TURN_CREDIT),
    *(SMALL_AND_LARGE, KNIGHTS_AND_KNAVES, SOKOBAN_ROUNDS, DISTANCE, REAL_PARITY),
)
"""All tables, in the order in which they are measured."""
