"""Cost of old rollouts, and corrections: ECHO-2, AReaL, LlamaRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.papers.cases import COLOCATED, Case, stale
from benchmarks.papers.runs import Found
from benchmarks.papers.table import Entry, Headline, Table, accuracy

AIPO: Final = {"name": "aipo"}
AIPO_11: Final = Case(name="AIPO, S = 11", settings=stale(11, objective=AIPO))
TWO_SIDED: Final = {bound: Case(name=f"two-sided, S = {bound}", settings=stale(bound)) for bound in (3, 6, 11)}
PUBLISHED_TWELFTH: Final = Case(name="two-sided, S = 11, κ = 10", settings=stale(11, training={"publish_every": 10}))
UNCORRECTED_11: Final = Case(
    name="no correction, S = 11", settings=stale(11, objective={"name": "grpo", "old_policy": "proximal"})
)


def _echo_2(found: Found) -> Headline:
    best = max(accuracy(found[case]) for case in (TWO_SIDED[11], AIPO_11))
    return {"s11_gap_corrected": accuracy(found[COLOCATED]) - best}


ECHO_2: Final = Table(
    name="ECHO-2: staleness",
    source="arXiv 2602.02192, staleness ablation",
    scale="Qwen3-4B and 8B; GRPO, mathematics",
    entries=(
        Entry(case=COLOCATED, reports="the reference"),
        Entry(case=TWO_SIDED[3], reports="no loss"),
        Entry(case=TWO_SIDED[6], reports="stable to here"),
        Entry(case=TWO_SIDED[11], reports="may break down"),
        Entry(case=PUBLISHED_TWELFTH, reports="κ = S - 1, its own choice of the period of publication"),
        Entry(case=AIPO_11, reports="-"),
    ),
    headline=_echo_2,
)

LLAMARL: Final = Table(
    name="LlamaRL: AIPO",
    source="arXiv 2505.24034, AIPO",
    scale="Llama 3.1, 8B to 405B; mathematics",
    entries=(
        Entry(case=AIPO_11, reports="asynchronous training as good as synchronous training"),
        Entry(case=UNCORRECTED_11, reports="without off-policy corrections training may become unstable"),
    ),
    headline=lambda found: {"aipo_over_none": accuracy(found[AIPO_11]) - accuracy(found[UNCORRECTED_11])},
)

ETAS: Final = (0, 8, 16)
UPDATES: Final = {"updates_per_step": 4}
"""AReaL's minibatches."""


def _areal(name: str, objective: Mapping[str, Any]) -> dict[int, Case]:
    return {
        eta: Case(name=f"{name}, η = {eta}", settings=stale(eta, objective=objective, training=UPDATES), seconds=13)
        for eta in ETAS
    }


_SAME: Final = {"aggregation": "token_mean", "advantage": "batch_std"}
DECOUPLED: Final = _areal("decoupled", {"name": "decoupled_ppo"})
RECOMPUTED: Final = _areal("naive, recomputed", {"name": "grpo", "old_policy": "proximal", **_SAME})
BEHAVIOR: Final = _areal("naive, behaviour", {"name": "grpo", **_SAME})
AIME24: Final = {
    "decoupled": {0: "42.0", 1: "42.1", 2: "41.8", 4: "42.2", 8: "41.0", 16: "38.7"},
    "naive": {0: "42.0", 1: "41.8", 2: "40.0", 4: "23.3", 8: "35.7", 16: "35.8"},
}


def _decoupled_over_naive(found: Found) -> Headline:
    decoupled = accuracy(found[DECOUPLED[8]])
    return {
        "decoupled_over_naive_eta8": decoupled - accuracy(found[RECOMPUTED[8]]),
        "decoupled_over_behavior_eta8": decoupled - accuracy(found[BEHAVIOR[8]]),
    }


AREAL: Final = Table(
    name="AReaL: decoupled PPO",
    source="arXiv 2505.24298, table 2",
    scale="DeepSeek-R1-Distill-Qwen-1.5B, AIME24, in %",
    entries=tuple(
        Entry(case=cases[eta], reports=f"{AIME24[kind][eta]} ({kind})")
        for cases, kind in ((DECOUPLED, "decoupled"), (RECOMPUTED, "naive"), (BEHAVIOR, "naive"))
        for eta in ETAS
    ),
    headline=_decoupled_over_naive,
)
