"""Cases of the papers' comparisons. A case that several tables name runs once for each seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from benchmarks.harness.site import Settings
from benchmarks.learning import cases
from benchmarks.learning.cases import stale
from echo_hub.learner.sft_plan import SftSettings

SEEDS: Final = 3
MOST_SEEDS: Final = 6
"""Most seeds of a table. It keeps the seeds of `--seed 0` and `--seed 1` apart."""
STEPS: Final = 40
GROUPS: Final = 16
"""Groups of a step."""

Runner = Literal["virtual", "episodes", "trl", "untrained", "finetuned"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Case(cases.Case):
    """One way to train."""

    sizes: ClassVar[Settings] = {
        "training": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": 8},
        "evaluation": {"problems": 512},
    }
    runner: Runner = "virtual"
    """virtual: the hub's own coordinator and learner in virtual time. episodes: the learner draws for itself, with
    games of several turns. trl: GRPOTrainer. untrained: the base is only evaluated. finetuned: `echo-hub sft`."""
    start: Case | None = None
    """A `finetuned` case whose result this case begins with."""
    demonstrations: int = 0
    sft: SftSettings | None = None
    """Settings of a `finetuned` case."""
    same_draws: bool = False
    """True if TRL's trainer begins with the hub's own adapter, and draws with its sampler and seeds."""
    precision: str = "policy"
    """The sampler: `policy` for the learner's own model, or a precision of the node's llama.cpp engine."""
    delay_s: float | None = None
    """Delay between hub and nodes, each way; None for nodes that take no time."""
    evaluate_every: int = 10
    seconds: float = 10.0
    """Expected time of one seed's run on one core."""

    def runs(self, seeds: int) -> int:
        """Return the number of different runs. Untrained and fine-tuned cases are the same for all seeds."""
        return 1 if self.runner in ("untrained", "finetuned") else seeds


COLOCATED: Final = Case(name="co-located")
SEQUENTIAL: Final = Case(name="sequential", settings={"run": {"mode": "sequential"}})
ASYNC: Final = Case(name="async, S = 2", settings=stale(2))
