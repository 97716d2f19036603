"""Trust on a real vocabulary: honest engines and forgers of a model of 135 M parameters, judged offline.

Every engine samples batches of rollouts of SmolLM2-135M-Instruct: short answers and long texts, with the base and with
a policy trained for some steps, at two temperatures. Verifiers in float32 and in bfloat16 measure the rounding of each
class (backend and precision), as in a hub, and examine the batches. Then the hub's own rules (`core.trust`) judge
nodes. Each node is alone in its class, which is the hardest case:

- Honest nodes return the batches' groups in random orders, until each class has `HONEST_ROLLOUTS` rollouts.
  `false_quarantines_real` counts the quarantined ones.
- Forgers return short answers that an attack has changed; a verifier in float32 examines them. `to_detection` is the
  number of checked rollouts until the node is quarantined: the worst of `HOSTILE_NODES` nodes that begin with different
  groups.

A row of kind "scale" has the sizes of the rounding errors in draws and in claimed log-probabilities, in nats: as the
verifier measured them, as the rules use them, and as they fit the engine's own tokens best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import real_model
from benchmarks.harness.engine import lacks
from benchmarks.harness.progress import Planned, Progress
from benchmarks.honesty.judging import Known, honest_nodes, judged_in_order, known_by
from benchmarks.honesty.samplers import (
    STEPS,
    UNCHANGED,
    Asked,
    Engine,
    Rollouts,
    Sampler,
    ShortRun,
    as_drawn,
    at_temperature,
    best_of,
    by_version,
    claiming,
    opened,
    written_by_hand,
    wrong_by_hand,
)
from benchmarks.honesty.samplers import (
    honest as honest_ones,
)
from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.likelihood import SCALES
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.intake.episodes import PROMPTS
from echo_hub.tasks.base import Problem
from echo_hub.verify.drawn import unpack_evidence, unpack_spans
from echo_hub.verify.worker import Examiner

TEMPERATURES: Final = (1.0, 0.6)
VERIFIERS: Final = ("float32", "bfloat16")
FORGERS_VERIFIER: Final = "float32"
"""Precision of the verifier that looks for forgers: the one that `trust.verifier_precision` chooses by default."""
SHORT: Final = 10
LONG: Final = 200
GROUPS: Final = {SHORT: 16, LONG: 1}
"""Number of groups that an honest engine samples in a batch, by the length of completions in tokens. A group has eight
rollouts.
"""
TRAINED_GROUPS: Final = 8
ATTACKED: Final = STEPS // 3
"""Version that forgers claim. The last version is not used: because it is sure of most tokens, forgeries would hardly
show or do harm.
"""
THREADS: Final = 2
HONEST_ROLLOUTS: Final = 5_000
"""Minimum number of rollouts of honest nodes in each class of numerics (backend and precision)."""
ATTACKED_GROUPS: Final = 25
"""Number of groups that an attack samples. A hostile node without conviction after these groups counts as undetected.
"""
TOGETHER: Final = 5
"""Number of groups of an attack that are sampled, and then examined, in one batch."""
HOSTILE_NODES: Final = 2
UNDETECTED: Final = 10_000
"""Value of `to_detection` (number of rollouts until the conviction) for a node that is never convicted."""
FIFTH: Final = 5
Falsify = Callable[[Sampler, Sequence[Asked]], Rollouts]
_WORDS: Final = ("a cat", "the sea", "winter", "a bicycle", "bread", "a mountain", "the moon", "a train", "honey")


class Texts:
    """A task with two kinds of prompts: sums in words for short completions, and stories for long ones."""

    name = "texts"

    def __init__(self, max_tokens: int) -> None:
        self._is_short = max_tokens <= SHORT

    def sample(self, seed: int) -> Problem:
        """Return the problem with this seed; its metadata holds the `answer`."""
        rng = random.Random(seed)
        left, right = rng.randrange(1, 13), rng.randrange(1, 13)
        if self._is_short:
            asked = f"What is {left} + {right}? Answer with the number only."
        else:
            asked = f"Write a story of {left + right} sentences about {rng.choice(_WORDS)}."
        return Problem(prompt=asked, metadata={"answer": str(left + right)})

    def score(self, problem: Problem, completion: str) -> float:
        return float(problem.metadata["answer"] in completion)


def _shifted(nats: float) -> Any:
    return claiming(lambda claims, _wrong: np.minimum(claims + nats, 0.0))


def _a_fifth_by_hand(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """Replace every fifth rollout by a right answer that no engine sampled."""
    by_hand = written_by_hand(sampler, asked)
    return [by_hand[place] if place % FIFTH == 0 else own for place, own in enumerate(sampler.draw(asked))]


def _copied(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """Return each rollout with the tokens and claimed log-probabilities of the previous rollout."""
    drawn = sampler.draw(asked)
    return [
        (one, replace(rollout, completion_ids=other.completion_ids, behavior_logprobs=other.behavior_logprobs))
        for (one, rollout), (_, other) in zip(drawn, [*drawn[-1:], *drawn[:-1]], strict=True)
    ]


ATTACKS: Final = {
    "temperature 0.7": at_temperature(0.7),
    "temperature 1.5": at_temperature(1.5),
    "the base alone": by_version(0),
    "best of 4": best_of(4),
    "right answers by hand": written_by_hand,
    "right answers by hand, a fifth": _a_fifth_by_hand,
    "wrong answers by hand": wrong_by_hand,
    "copied rollouts": _copied,
    "claims 0.3 nats lower": _shifted(-0.3),
    "claims 0.3 nats higher": _shifted(0.3),
    "claims of -10": claiming(lambda claims, _wrong: np.full_like(claims, -10.0)),
    "-3 nats for wrong tokens": claiming(lambda claims, wrong: np.where(wrong, claims - 3.0, claims)),
}
"""Attacks by name. Each changes the rollouts of a node, which claims the trained policy at the run's temperature."""
AS_FLOAT32: Final = "claims to be float32"
COARSE: Final = ("q8_0", "q4_k_m", "bf16")
"""Precisions of nodes that are also judged while they claim float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    temperature: float
    runs: Mapping[int, ShortRun]
    """Training run for each length of completions in tokens."""
    examiners: Mapping[tuple[str, int], Examiner]
    """Verifier for each pair of its precision and the length of completions in tokens."""
    measured: dict[tuple[str, int, str, int], Evidence] = field(default_factory=dict)

    def rounding(self, precision: str, tokens: int, rounding: str, version: int) -> Evidence:
        """Return the rounding of a class of numerics (backend and precision) (`rounding`) for completions of this many
        `tokens`, as the verifier of this `precision` measures it.
        """
        key = precision, tokens, rounding, version
        if key not in self.measured:
            run = self.runs[tokens]
            prompts = [one.request.prompt_ids for one in run.asked("to measure", PROMPTS)]
            answer = self.examiners[precision, tokens].measure(rounding, version, run.adapters, prompts)
            self.measured[key] = unpack_evidence(answer["evidence"])
        return self.measured[key]


@dataclass(frozen=True, slots=True)
class _Remembering(Sampler):
    """Samples each group only once: all attacks change the same rollouts."""

    drawn: dict[tuple[int, int, int, float], Rollouts] = field(default_factory=dict)

    def draw(self, asked: Sequence[Asked], *, version: int | None = None, hotter: float = 1.0) -> Rollouts:
        version = self.version if version is None else version
        keys = {(one.request.group_id, one.request.seed, version, hotter): one for one in asked}
        missing = [one for key, one in keys.items() if key not in self.drawn]
        if missing:
            for one, rollout in Sampler.draw(self, missing, version=version, hotter=hotter):
                key = one.request.group_id, one.request.seed, version, hotter
                self.drawn.setdefault(key, []).append((one, rollout))
        return [rollout for key in keys for rollout in self.drawn[key]]


def case(engine: str, temperature: float) -> str:
    return f"real, {engine}, T = {temperature:g}"


def plan() -> list[Planned]:
    return [
        Planned(
            name=case(name, temperature),
            seconds=240,
            lacks=real_model.lacks() or lacks(engine.backend, engine.precision),
        )
        for temperature in TEMPERATURES
        for name, engine in UNCHANGED.items()
    ]


def measure(scratch: Path, progress: Progress, *, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each case, of the kinds "scale", "honest" and "attack"."""
    base: Path | None = None
    for temperature in TEMPERATURES:
        wanted = {name: engine for name, engine in UNCHANGED.items() if progress.wants(case(name, temperature))}
        if not wanted:
            continue
        if base is None:
            base = real_model.unpacked(scratch / "real" / "model")
            trained = ShortRun(scratch / "real" / "run", seed, base=base, task=Texts(SHORT), max_tokens=SHORT)
            trained.train(TRAINED_GROUPS)
        bench = _bench(scratch / "real" / "run", base, temperature, seed)
        for name, engine in wanted.items():
            found = list(_of_engine(bench, name, engine, scratch / "real" / f"{name} {temperature:g}", seed))
            progress.done(case(name, temperature), headline(found))
            yield found


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of false quarantines, the largest number of rollouts to detection, and the number of honest
    rollouts.
    """
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


def _bench(directory: Path, base: Path, temperature: float, seed: int) -> Bench:
    runs = {
        tokens: ShortRun(directory, seed, base=base, task=Texts(tokens), temperature=temperature, max_tokens=tokens)
        for tokens in GROUPS
    }
    examiners = {}
    for precision, (tokens, run) in product(VERIFIERS, runs.items()):
        learner = run.settings.learner.model_copy(update={"precision": precision, "threads": THREADS})
        opening = run.settings.model_copy(update={"learner": learner})
        examiners[precision, tokens] = Examiner.open({"settings": opening.model_dump(mode="json"), "kept": 2})
    return Bench(temperature=temperature, runs=runs, examiners=examiners)


def _of_engine(bench: Bench, name: str, engine: Engine, scratch: Path, seed: int) -> Iterator[dict[str, Any]]:
    with opened(bench.runs[SHORT], engine, scratch, version=STEPS, threads=THREADS) as sampler:
        for tokens, run in bench.runs.items():
            judges = {precision: _Judge.of(bench, precision, tokens, engine) for precision in VERIFIERS}
            for version in (0, STEPS):
                about = {"engine": name, "temperature": bench.temperature, "tokens": tokens, "version": version}
                asked = run.asked(f"{name} {about}", GROUPS[tokens])
                drawn = replace(sampler, run=run, version=version).draw(asked)
                for precision, judge in judges.items():
                    yield from judge.of_honest({**about, "verifier": precision}, drawn, version, seed)
        remembering = _Remembering(sampler.run, sampler.engine, ATTACKED)
        asked = sampler.run.asked(f"attack {name} {bench.temperature}", ATTACKED_GROUPS)
        judge = _Judge.of(bench, FORGERS_VERIFIER, SHORT, engine)
        about = {"engine": name, "temperature": bench.temperature, "tokens": SHORT, "verifier": FORGERS_VERIFIER}
        for attack, falsify in ATTACKS.items():
            yield judge.of_attack({**about, "attack": attack}, remembering, falsify, asked)
        if engine.precision in COARSE:
            other = _Judge.of(bench, FORGERS_VERIFIER, SHORT, replace(engine, precision="f32"))
            yield other.of_attack({**about, "attack": AS_FLOAT32}, remembering, honest_ones, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """Judges the nodes of one class of numerics (backend and precision), like a hub that has measured each version's
    rounding but has no evidence from nodes yet.
    """

    bench: Bench
    examiner: Examiner
    measured: Mapping[int, Evidence]
    known: Mapping[int, Known]
    """Rounding errors expected of honest nodes of this class, by policy version."""

    @classmethod
    def of(cls, bench: Bench, precision: str, tokens: int, engine: Engine) -> _Judge:
        numerics = NumericsClass(engine.backend, engine.precision, "cpu")
        measured, known = {}, {}
        for version in (0, STEPS) if tokens == LONG else (0, ATTACKED, STEPS):
            measured[version] = bench.rounding(precision, tokens, numerics.rounding, version)
            known[version] = known_by(numerics, measured[version], temperature=bench.temperature)
        return cls(bench=bench, examiner=bench.examiners[precision, tokens], measured=measured, known=known)

    def _shown(self, rollouts: Rollouts, version: int) -> list[tuple[int, Evidence]]:
        drawn = as_drawn(rollouts, version)
        answers = self.examiner.examine(drawn, self.bench.runs[SHORT].adapters)
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
        """Judge honest nodes that return the groups in random orders. Yield a row of kind "scale", then a row of kind
        "honest".
        """
        shown, known, measured = self._shown(rollouts, version), self.known[version], self.measured[version]
        honest = known(NO_EVIDENCE)
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
        verdicts = honest_nodes(shown, known, count=nodes, seed=seed)
        yield {"kind": "honest", **about, "rollouts": nodes * len(shown), **verdicts}

    def of_attack(
        self, about: Mapping[str, Any], sampler: Sampler, falsify: Falsify, asked: Sequence[Asked]
    ) -> dict[str, Any]:
        """Return the row of hostile nodes with this attack. All return the same groups, but each begins with another
        group.
        """
        batches = [asked[start : start + TOGETHER] for start in range(0, len(asked), TOGETHER)]

        @cache
        def shown(batch: int) -> list[Evidence]:
            return [evidence for _, evidence in self._shown(falsify(sampler, batches[batch]), ATTACKED)]

        after = []
        for node in range(HOSTILE_NODES):
            first = node * len(batches) // HOSTILE_NODES
            order = (one for place in range(len(batches)) for one in shown((first + place) % len(batches)))
            verdicts = enumerate(judged_in_order(order, self.known[ATTACKED]), start=1)
            after.append(next((place for place, (_, failed) in verdicts if failed), UNDETECTED))
        return {"kind": "attack", **about, "to_detection": max(after), "median": float(np.median(after))}


def _scales(measured: Evidence, own: Evidence, curves: str, used: int) -> Iterator[tuple[str, float]]:
    for what, evidence in (("measured", measured), ("own", own)):
        yield what, float(SCALES[getattr(evidence, curves)[0].argmax()])
    yield "used", float(SCALES[used])
