"""Cost of hostile rollouts for the model: complete runs of the built-in model, with and without hostile rollouts.

A run has two nodes with the same engine. One node falsifies rollouts. They are `hostile_share` of all rollouts, as long
as the hub accepts them. `learned` is the held-out accuracy of the last version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.engine import lacks
from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.site import Settings, open_site

STEPS: Final = 60
ENDS_AFTER_S: Final = 400.0
SECONDS: Final = 75.0
ATTACKS: Final = ("forged digits, possible claims", "claims of -10", "hand-written answers")
SHARES: Final = (0.01, 0.2)
NODE_OPTIONS: Final = ("--backend", "llama_cpp", "--precision", "f32")
SETTINGS: Final[Settings] = {
    "training": {"steps": STEPS},
    "evaluation": {"problems": 4096},
}
UNDEFENDED: Final[Settings] = {"objective": {"name": "grpo"}, "trust": {"verifier": "off"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    attack: str = ""
    hostile_share: float = 0.0
    defended: bool = True

    @property
    def name(self) -> str:
        what = f"{self.attack}, {self.hostile_share:.0%}" if self.attack else "no attack"
        return f"accuracy, {what}{'' if self.defended else ', undefended'}"


HONEST: Final = Case()
CASES: Final = (
    HONEST,
    *(Case(attack=attack, hostile_share=share) for attack in ATTACKS for share in SHARES),
    Case(attack=ATTACKS[0], hostile_share=SHARES[0], defended=False),
)


def plan() -> list[Planned]:
    return [Planned(name=case.name, seconds=SECONDS, lacks=lacks("llama_cpp", "f32")) for case in CASES]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    rows = []
    for number, case in enumerate(CASES):
        if progress.wants(case.name):
            row = {"case": case.name, **_run(case, scratch / f"accuracy{number}", seed)}
            rows.append(row)
            progress.done(case.name, {"learned": row["learned"], "hostile_trained": row["hostile_trained"]})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, for each share of hostile rollouts, the accuracy of the honest run minus that of the run with the worst
    attack.
    """
    learned = {row["case"]: row["learned"] for row in rows}
    found = {}
    for share in SHARES:
        attacked = [case.name for case in CASES if case.hostile_share == share and case.defended]
        known = [learned[name] for name in attacked if name in learned]
        if HONEST.name in learned and known:
            found[f"accuracy_lost_at_{share * 100:.0f}pct"] = learned[HONEST.name] - min(known)
    return found


def _run(case: Case, directory: Path, seed: int) -> dict[str, Any]:
    settings = {**SETTINGS, **({} if case.defended else UNDEFENDED), "run": {"name": "trust", "seed": seed}}
    began_at = time.monotonic()
    with open_site(directory, settings) as site:
        site.node(NODE_OPTIONS)
        hostile = site.node(NODE_OPTIONS, attack=case.attack, share=min(1.0, 2 * case.hostile_share))
        last = "SELECT accuracy FROM evaluations WHERE policy_version = ?"
        ((learned,),) = site.wait_until(lambda: site.rows(last, STEPS), within_s=ENDS_AFTER_S)
        query = (
            "SELECT sum(rollouts) FILTER (WHERE nodes.name = ?) * 1.0 / sum(rollouts)"
            " FROM tallies JOIN nodes USING (node_id) WHERE outcome = 'trained'"
        )
        ((share,),) = site.rows(query, hostile.name)
    return {"learned": float(learned), "seconds": time.monotonic() - began_at, "hostile_trained": float(share or 0.0)}
