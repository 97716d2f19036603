"""Echo (arXiv 2508.05387): sampling on other machines, synchronous or asynchronous, costs no reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchmarks.papers.cases import ASYNC, COLOCATED, MOST_SEEDS, SEQUENTIAL, Case, stale
from benchmarks.papers.ran import Ran
from benchmarks.papers.runs import Found
from benchmarks.papers.small import DEMONSTRATED, LARGE, SOKOBAN, TRAINED_KNIGHTS
from benchmarks.papers.table import Entry, Headline, Table, accuracy

SOURCE: Final = "arXiv 2508.05387"
TRL: Final = Case(name="TRL's GRPOTrainer", runner="trl", seconds=12)
TRL_SAME_DRAWS: Final = Case(name="TRL's GRPOTrainer, by the same draws", runner="trl", same_draws=True, seconds=12)
TRAINED: Final = Case(
    name="builtin:tiny, trained",
    settings={"training": {"steps": 60, "groups_per_step": 32}},
    evaluate_every=20,
    seconds=21,
)
FAR: Final = {
    milliseconds: Case(name=f"nodes {milliseconds} ms away", settings=stale(2), delay_s=milliseconds / 1000)
    for milliseconds in (40, 150, 300)
}


def _parity(found: Found) -> Headline:
    apart = min(accuracy(found[SEQUENTIAL]), accuracy(found[ASYNC]))
    return {"parity_gap": accuracy(found[COLOCATED]) - apart}


def _trl(found: Found) -> Headline:
    """Return the largest distance of the two mean curves at any point. With the same draws it shows how the trainers
    differ; with its own draws it includes chance."""
    ours = _mean_curve(found[COLOCATED])
    cases = {"trl_curve_gap": TRL_SAME_DRAWS, "trl_own_draws_gap": TRL}
    return {
        name: max(abs(left - right) for left, right in zip(ours, _mean_curve(found[case]), strict=True))
        for name, case in cases.items()
    }


def _mean_curve(ran: Sequence[Ran]) -> list[float]:
    return [fmean(point.accuracy for point in place) for place in zip(*(one.points for one in ran), strict=True)]


def _utilisation(case: Case, ran: Sequence[Ran]) -> Mapping[str, Any]:
    return {"utilisation": fmean(one.utilisation for one in ran if one.utilisation is not None)}


def _gain(found: Found) -> Headline:
    return {"sokoban_gain": min(one.accuracy - one.points[0].accuracy for one in found[SOKOBAN])}


def _over_large(found: Found) -> Headline:
    return {"small_beats_4x_by": accuracy(found[TRAINED]) - accuracy(found[LARGE])}


PARITY: Final = Table(
    name="Echo: parity",
    source=f"{SOURCE}, section on experiments",
    scale="Qwen3-4B, 7B and 32B; Sokoban, mathematics, Knights & Knaves",
    entries=(
        Entry(case=COLOCATED, reports="the reference: verl, co-located on one cluster"),
        Entry(case=SEQUENTIAL, reports="same convergence and final reward"),
        Entry(case=ASYNC, reports="same convergence and final reward"),
    ),
    headline=_parity,
)
TRL_CURVE: Final = Table(
    name="Echo: TRL's curve",
    source=SOURCE,
    scale="verl there; TRL's GRPOTrainer here",
    entries=(
        Entry(case=COLOCATED, reports="curves of Echo and of the co-located trainer lie on each other"),
        Entry(case=TRL_SAME_DRAWS, reports="-"),
        Entry(case=TRL, reports="-"),
    ),
    headline=_trl,
    seeds=MOST_SEEDS,
)
SMALL_AND_LARGE: Final = Table(
    name="Echo: small against four times larger",
    source=f"{SOURCE}, Sokoban",
    scale="Qwen3-4B, trained, against Qwen3-32B as it is",
    entries=(
        Entry(case=TRAINED, reports="the trained small model is ahead"),
        Entry(case=LARGE, reports="-"),
    ),
    headline=_over_large,
    curves=False,
)
DISTANCE: Final = Table(
    name="Echo: far nodes",
    source=f"{SOURCE}, deployment",
    scale="inference swarm of consumer devices at other places, over wide-area links",
    entries=tuple(
        Entry(case=case, reports="sampling over wide-area links, no loss of reward") for case in FAR.values()
    ),
    headline=lambda found: {},
    columns=_utilisation,
)
KNIGHTS_AND_KNAVES: Final = Table(
    name="Echo: Knights & Knaves",
    source=SOURCE,
    scale="Qwen2.5-32B with LoRA, 2 to 8 people",
    entries=(
        Entry(case=DEMONSTRATED, reports="-"),
        Entry(case=TRAINED_KNIGHTS, reports="99 % and more"),
    ),
    headline=lambda found: {"knk_accuracy": accuracy(found[TRAINED_KNIGHTS])},
    curves=False,
)
SOKOBAN_ROUNDS: Final = Table(
    name="Echo: Sokoban",
    source=SOURCE,
    scale="Qwen3-4B, four rounds",
    entries=(Entry(case=SOKOBAN, reports="21.8 to 34.0 %"),),
    headline=_gain,
)
