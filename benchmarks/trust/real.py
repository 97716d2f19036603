"""Trust on a real vocabulary: honest engines and forgers of a model of 135 M parameters, judged offline.

Every engine draws batches of rollouts of SmolLM2-135M-Instruct: short answers and long texts, by the base and by a
policy that was trained for some steps, at two temperatures. Verifiers in float32 and in bfloat16 measure the rounding
of each class, as a hub does, and examine the batches. Nodes are then judged by the hub's own rules (`core.trust`), each
of them alone in its class, which is the hardest case:

- honest ones are given the batches' groups in random orders, until each class has `HONEST_ROLLOUTS`: all that are
  quarantined are `false_quarantines_real`.
- forgers are given what an attack makes of the short answers: `to_detection` of a row is the number of checked rollouts
  until the node is quarantined, the worst of `ORDERS` orders of its groups.

A row of kind "scale" has the scales of rounding, in nats, of draws and claims: as the verifier measured them, as it
uses them, and as the engine's own tokens fit best.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import real_model
from benchmarks.backends.cases import lacks
from benchmarks.honesty.samplers import (
    HONEST,
    Engine,
    Rollouts,
    Sampler,
    as_drawn,
    at_temperature,
    best_of,
    by_version,
    claiming,
    opened,
    written_by_hand,
    wrong_by_hand,
)
from benchmarks.honesty.short_run import STEPS, ShortRun
from benchmarks.progress import Planned, Progress
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING, added, alarm, weigh
from echo_hub.core.trust.likelihood import SCALES
from echo_hub.core.trust.numerics import Honest, Numerics, NumericsClass
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.tasks.base import Problem
from echo_hub.verify.drawn import unpack_evidence, unpack_spans
from echo_hub.verify.worker import Examiner

ENGINES: Final[Mapping[str, Engine]] = {
    name: HONEST[name]
    for name in ("torch f32", "torch bf16", "llama_cpp f32", "llama_cpp f16", "llama_cpp q8_0", "llama_cpp q4_k_m")
}
TEMPERATURES: Final = (1.0, 0.6)
VERIFIERS: Final = ("float32", "bfloat16")
SHORT: Final = 10
LONG: Final = 200
GROUPS: Final = {SHORT: 32, LONG: 2}
"""By tokens of a completion; of eight rollouts each."""
ATTACKED_GROUPS: Final = 24
TRAINED_GROUPS: Final = 8
THREADS: Final = 2
HONEST_ROLLOUTS: Final = 5_000
"""Of each class, at least."""
ORDERS: Final = 10
UNDETECTED: Final = 10_000
"""`to_detection` of a node that all of its rollouts do not convict."""
FIFTH: Final = 5
FALSE_ALARM: Final = TrustSettings().false_alarm
_WORDS: Final = ("a cat", "the sea", "winter", "a bicycle", "bread", "a mountain", "the moon", "a train", "honey")


class Texts:
    """Sums in words, or short texts to be written, by how long a completion is to be."""

    name = "texts"

    def __init__(self, max_tokens: int) -> None:
        self._is_short = max_tokens <= SHORT

    def sample(self, seed: int) -> Problem:
        """The problem of `seed`; its metadata holds the `answer`."""
        rng = random.Random(seed)
        left, right = rng.randrange(1, 13), rng.randrange(1, 13)
        if self._is_short:
            asked = f"What is {left} + {right}? Answer with the number only."
        else:
            asked = f"Write a story of {left + right} sentences about {rng.choice(_WORDS)}."
        return Problem(prompt=asked, metadata={"answer": str(left + right)})

    def score(self, problem: Problem, completion: str) -> float:
        """1 where the number is in it."""
        return float(problem.metadata["answer"] in completion)


def _shifted(nats: float) -> Any:
    return claiming(lambda claims, _wrong: np.minimum(claims + nats, 0.0))


ATTACKS: Final = {
    "temperature 0.7": at_temperature(0.7),
    "temperature 1.5": at_temperature(1.5),
    "the base alone": by_version(0),
    "best of 4": best_of(4),
    "right answers by hand": written_by_hand,
    "wrong answers by hand": wrong_by_hand,
    "claims 0.3 nats lower": _shifted(-0.3),
    "claims 0.3 nats higher": _shifted(0.3),
    "claims of -10": claiming(lambda claims, _wrong: np.full_like(claims, -10.0)),
    "-3 nats for wrong tokens": claiming(lambda claims, wrong: np.where(wrong, claims - 3.0, claims)),
}
"""What a node may make of its work; all claim the trained policy at the run's temperature."""
A_FIFTH: Final = "right answers by hand, a fifth"
COPIED: Final = "copied rollouts"
AS_FLOAT32: Final = "claims to be float32"
COARSE: Final = ("q8_0", "q4_k_m", "bf16")
"""Precisions that are told from float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Runs and verifiers of one temperature."""

    temperature: float
    runs: Mapping[int, ShortRun]
    """By tokens of a completion."""
    examiners: Mapping[str, Examiner]
    """By precision."""


def case(engine: str) -> str:
    return f"real, {engine}"


def plan() -> list[Planned]:
    return [
        Planned(name=case(name), seconds=420, lacks=real_model.lacks() or lacks(engine.backend, engine.precision))
        for name, engine in ENGINES.items()
    ]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """Rows of the kinds "scale", "honest" and "attack"."""
    wanted = {name: engine for name, engine in ENGINES.items() if progress.wants(case(name))}
    if not wanted:
        return []
    benches = list(_benches(scratch / "real", seed))
    rows: list[dict[str, Any]] = []
    for number, (name, engine) in enumerate(wanted.items()):
        found = list(_of_engine(benches, name, engine, scratch / f"real-{number}", seed))
        rows += found
        progress.done(case(name), headline(found))
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The two figures that matter, and on how much they rest."""
    honest = [row for row in rows if row.get("kind") == "honest"]
    attacks = [row for row in rows if row.get("kind") == "attack"]
    found: dict[str, Any] = {}
    if honest:
        of_class: dict[str, int] = {}
        for row in honest:
            of_class[row["engine"]] = of_class.get(row["engine"], 0) + row["rollouts"]
        found["false_quarantines_real"] = sum(row["false_quarantines"] for row in honest)
        found["honest_rollouts_a_class_real"] = min(of_class.values())
        found["highest_honest_nats_real"] = max(row["highest_nats"] for row in honest)
    if attacks:
        found["worst_rollouts_to_detection_real"] = max(row["to_detection"] for row in attacks)
    return found


def _benches(scratch: Path, seed: int) -> Iterator[Bench]:
    base = real_model.unpacked(scratch / "model")
    trained = ShortRun(scratch / "run", seed, base=base, task=Texts(SHORT), max_tokens=SHORT)
    trained.train(TRAINED_GROUPS)
    for temperature in TEMPERATURES:
        runs = {
            tokens: ShortRun(
                scratch / "run", seed, base=base, task=Texts(tokens), temperature=temperature, max_tokens=tokens
            )
            for tokens in GROUPS
        }
        examiners = {}
        for precision in VERIFIERS:
            settings = runs[SHORT].settings
            learner = settings.learner.model_copy(update={"precision": precision, "threads": THREADS})
            opening = settings.model_copy(update={"learner": learner, "max_tokens": LONG})
            examiners[precision] = Examiner.open({"settings": opening.model_dump(mode="json"), "kept": 2})
        yield Bench(temperature=temperature, runs=runs, examiners=examiners)


def _of_engine(
    benches: Sequence[Bench], name: str, engine: Engine, scratch: Path, seed: int
) -> Iterator[dict[str, Any]]:
    with opened(benches[0].runs[SHORT], engine, scratch, version=STEPS) as first:
        for bench in benches:
            judges = {precision: _Judge.of(bench, precision, engine) for precision in bench.examiners}
            for tokens, run in bench.runs.items():
                sampler = replace(first, run=run)
                for version in (0, STEPS):
                    about = {"engine": name, "temperature": bench.temperature, "tokens": tokens, "version": version}
                    asked = run.asked(f"{name} {about}", GROUPS[tokens])
                    drawn = replace(sampler, version=version).draw(asked)
                    for precision, judge in judges.items():
                        yield from judge.of_honest({**about, "verifier": precision}, drawn, version, seed)
            yield from _attacked(bench, replace(first, run=bench.runs[SHORT]), name, engine, judges, seed)


def _attacked(
    bench: Bench, sampler: Sampler, name: str, engine: Engine, judges: Mapping[str, _Judge], seed: int
) -> Iterator[dict[str, Any]]:
    asked = sampler.run.asked(f"attack {name} {bench.temperature}", ATTACKED_GROUPS)
    honest = sampler.draw(asked)
    made = {attack: falsify(sampler, asked) for attack, falsify in ATTACKS.items()}
    by_hand = {(one.request.group_id, rollout.index): (one, rollout) for one, rollout in made["right answers by hand"]}
    made[A_FIFTH] = [
        by_hand[rollout.group_id, rollout.index] if place % FIFTH == 0 else (one, rollout)
        for place, (one, rollout) in enumerate(honest)
    ]
    made[COPIED] = [
        (one, replace(rollout, completion_ids=other.completion_ids, behavior_logprobs=other.behavior_logprobs))
        for (one, rollout), (_, other) in zip(honest, [*honest[-1:], *honest[:-1]], strict=True)
    ]
    for precision, judge in judges.items():
        about = {"engine": name, "temperature": bench.temperature, "tokens": SHORT, "verifier": precision}
        for attack, rollouts in made.items():
            yield judge.of_attack({**about, "attack": attack}, rollouts, seed)
        if engine.precision in COARSE:
            other = _Judge.of(bench, precision, replace(engine, precision="f32"))
            yield other.of_attack({**about, "attack": AS_FLOAT32}, honest, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """A hub that has measured one class by both policies, and has not seen any node of it."""

    bench: Bench
    examiner: Examiner
    measured: Mapping[int, Evidence]
    """By version."""
    honest: Mapping[int, Honest]

    @classmethod
    def of(cls, bench: Bench, precision: str, engine: Engine) -> _Judge:
        numerics = NumericsClass(engine.backend, engine.precision, "cpu")
        examiner, run = bench.examiners[precision], bench.runs[SHORT]
        prompts: list[NDArray[np.int32]] = []
        for tokens, other in bench.runs.items():
            prompts += [one.request.prompt_ids for one in other.asked("to measure", GROUPS[tokens])]
        measured, honest = {}, {}
        for version in (0, STEPS):
            answer = examiner.measure(numerics.rounding, version, run.directory.adapter, prompts)
            measured[version] = unpack_evidence(answer["evidence"])
            known = Numerics(bench.temperature)
            known.measured(numerics.rounding, measured[version])
            honest[version] = known.honest(known.known(numerics))
        return cls(bench=bench, examiner=examiner, measured=measured, honest=honest)

    def _shown(self, rollouts: Rollouts, version: int) -> list[tuple[int, Evidence]]:
        """Of each rollout its group and what it shows, group after group."""
        drawn = as_drawn(rollouts, version)
        answers = self.examiner.examine(drawn, self.bench.runs[SHORT].directory.adapter)
        found = {answer["rollout_id"]: unpack_spans(answer["spans"])[0][1] for answer in answers}
        return sorted(
            (
                (one.request.group_id, found[drawn_as.rollout_id])
                for (one, _), drawn_as in zip(rollouts, drawn, strict=True)
            ),
            key=lambda pair: pair[0],
        )

    def of_honest(
        self, about: Mapping[str, Any], rollouts: Rollouts, version: int, seed: int
    ) -> Iterator[dict[str, Any]]:
        """Nodes that are given the groups in random orders, and what the verifier knew of their rounding."""
        shown, honest, measured = self._shown(rollouts, version), self.honest[version], self.measured[version]
        own = sum((evidence for _, evidence in shown[1:]), shown[0][1])
        yield {
            "kind": "scale",
            **about,
            "num_tokens": own.num_tokens,
            **{f"{what}_draws": draws for what, draws in _scales(measured, own, "draws_CS", honest.draws)},
            **{f"{what}_claims": claims for what, claims in _scales(measured, own, "claims_CS", honest.claims)},
        }
        per_set = HONEST_ROLLOUTS / (len(TEMPERATURES) * len(GROUPS) * 2)
        nodes = max(1, int(np.ceil(per_set / len(shown))))
        nats = [_nats(order, honest) for order in _orders(shown, nodes, seed)]
        yield {
            "kind": "honest",
            **about,
            "rollouts": nodes * len(shown),
            "false_quarantines": sum(bool(max(of_node) >= alarm(FALSE_ALARM)) for of_node in nats),
            "highest_nats": max(max(of_node) for of_node in nats),
        }

    def of_attack(self, about: Mapping[str, Any], rollouts: Rollouts, seed: int) -> dict[str, Any]:
        """One hostile node in several orders of its groups."""
        shown, honest = self._shown(rollouts, STEPS), self.honest[STEPS]
        enough = alarm(FALSE_ALARM)
        after = []
        for order in _orders(shown, ORDERS, seed):
            above = [place for place, nats in enumerate(_nats(order, honest), start=1) if nats >= enough]
            after.append(above[0] if above else UNDETECTED)
        return {
            "kind": "attack",
            **about,
            "rollouts": len(shown),
            "to_detection": max(after),
            "median": np.median(after),
        }


def _nats(order: Sequence[Evidence], honest: Honest) -> list[float]:
    """What speaks against a node after each of its rollouts."""
    sums, found = NOTHING, []
    for evidence in order:
        sums = added(sums, weigh(evidence, honest))
        found.append(max(sums))
    return found


def _orders(shown: Sequence[tuple[int, Evidence]], count: int, seed: int) -> Iterator[list[Evidence]]:
    """The rollouts group after group, the groups in so many random orders."""
    groups: dict[int, list[Evidence]] = {}
    for group_id, evidence in shown:
        groups.setdefault(group_id, []).append(evidence)
    for number in range(count):
        ids = list(groups)
        random.Random(f"{seed} {number}").shuffle(ids)
        yield [evidence for group_id in ids for evidence in groups[group_id]]


def _scales(measured: Evidence, own: Evidence, curves: str, used: int) -> Iterator[tuple[str, float]]:
    for what, evidence in (("measured", measured), ("own", own)):
        yield what, float(SCALES[getattr(evidence, curves)[0].argmax()])
    yield "used", float(SCALES[used])
