"""The engine process of a hostile node: `echo_node.backends.worker` with a real engine whose results are falsified.

The rest of the node is `echo-node` itself: it joins, fetches and sends like an honest node. `node` starts this module.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.harness.wrapped_engine import WrappedEngine
from echo_node.backends import registry, worker
from echo_node.backends.base import Engine, EngineEvent, EngineSettings, GroupFailed, PreparedPolicy
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason, rollout_id

REROLLS: Final = 4
TURNS_AFTER: Final = 128
"""Number of honest rollouts with which a node earns trust before it forges."""
_PROBLEM: Final = re.compile(r"(\d+)\+(\d+)=$")


class Problems:
    """Recovers the text and the right answer of the built-in task's problems from the tokens of prompts, for engines
    that forge completions.
    """

    def __init__(self, base_dir: Path) -> None:
        vocabulary = json.loads((base_dir / "tokenizer.json").read_text())["model"]["vocab"]
        self._ids: Mapping[str, int] = vocabulary
        self._texts = {number: text for text, number in vocabulary.items()}

    def answer(self, request: GroupRequest) -> str:
        found = _PROBLEM.search(self.text(request.prompt_ids))
        assert found is not None, "the prompt is one of the built-in task's"
        return str(int(found[1]) + int(found[2]))

    def text(self, ids: Sequence[int] | np.ndarray[Any, Any]) -> str:
        return "".join(self._texts[int(token)] for token in ids)

    def is_right(self, rollout: FinishedRollout, request: GroupRequest) -> bool:
        stops = set(request.stop_ids)
        return self.text([token for token in rollout.completion_ids if int(token) not in stops]) == self.answer(request)

    def written(
        self, rollout: FinishedRollout, request: GroupRequest, text: str, claims: Sequence[float]
    ) -> FinishedRollout:
        """Return the rollout with `text` as its completion and `claims` as its log-probabilities. The last of the
        `claims` belongs to the stop token.
        """
        ids = np.array([*(self._ids[letter] for letter in text), request.stop_ids[0]], np.int32)[: request.max_tokens]
        is_whole = len(ids) == len(text) + 1
        return replace(
            rollout,
            completion_ids=ids,
            behavior_logprobs=np.array(claims[: len(ids)], np.float32),
            finish_reason=FinishReason.STOP if is_whole else FinishReason.LENGTH,
        )


class Falsification:
    """How a hostile node falsifies its results; by default nothing is changed.

    `share`: share of the rollouts that `alter` changes. `temperature`: factor by which the lease's temperature is
    multiplied. `has_policies`: False to sample from the base model, while the node claims the leased version. `says`:
    the precision that the node claims; "" for the engine's own.
    """

    def __init__(
        self,
        share: float = 1.0,
        *,
        alter: Alter | None = None,
        temperature: float = 1.0,
        has_policies: bool = True,
        says: str = "",
    ) -> None:
        self.problems: Problems | None = None
        self.num_told = 0
        self.before: FinishedRollout | None = None
        self.has_policies = has_policies
        self.says = says
        self.draws_otherwise = temperature != 1.0 or not has_policies or bool(says)
        """True if every rollout is forged, because the engine samples with other weights, temperature or precision than
        the hub is told.
        """
        self._share = share
        self._alter = alter
        self._temperature = temperature

    def base(self, base_dir: Path, _scratch: Path) -> Path:
        """Return the directory of the model that the engine loads."""
        return base_dir

    def asked(self, request: GroupRequest) -> Sequence[GroupRequest]:
        """Return the requests that the engine gets in place of the lease's request."""
        return (replace(request, temperature=request.temperature * self._temperature),)

    def told(self, rollout: FinishedRollout, request: GroupRequest, _number: int) -> Sequence[EngineEvent]:
        """Return the events that the node gets in place of `rollout`. `request` is that of the lease; `_number` is the
        index in `asked` of the request that gave the rollout.
        """
        self.num_told += 1
        is_altered = int(self.num_told * self._share) > int((self.num_told - 1) * self._share)
        told = self._alter(self, rollout, request) if self._alter is not None and is_altered else rollout
        self.before = rollout
        return [told]

    @property
    def known(self) -> Problems:
        assert self.problems is not None, "the engine is open"
        return self.problems


Alter = Callable[[Falsification, FinishedRollout, GroupRequest], EngineEvent]


def forged_digits(nats: float) -> Alter:
    """Return a falsification that writes the right answer with a wrong last digit, and claims a log-probability of
    `nats` for each other digit. Training on such a rollout pushes a good policy away from these digits with full force.
    """

    def alter(node: Falsification, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        answer = node.known.answer(request)
        wrong = answer[:-1] + str((int(answer[-1]) + 1) % 10)
        return node.known.written(rollout, request, wrong, [*[nats] * (len(wrong) - 1), -0.1, -0.1])

    return alter


def hand_written(node: Falsification, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
    """Write the right answer without sampling it, and claim a high probability for each token."""
    answer = node.known.answer(request)
    return node.known.written(rollout, request, answer, [-0.1] * (len(answer) + 1))


def hand_written_later(node: Falsification, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
    """Stay honest for the first `TURNS_AFTER` rollouts, then write the right answers without sampling."""
    return rollout if node.num_told <= TURNS_AFTER else hand_written(node, rollout, request)


def claimed_at(nats: float) -> Alter:
    """Return a falsification that claims the log-probability `nats` for every token of an honest rollout."""
    return lambda node, rollout, request: replace(
        rollout, behavior_logprobs=np.full_like(rollout.behavior_logprobs, nats)
    )


def shifted_claims(nats: float) -> Alter:
    """Return a falsification that claims each log-probability of an honest rollout `nats` too high."""
    return lambda node, rollout, request: replace(
        rollout, behavior_logprobs=np.minimum(rollout.behavior_logprobs + np.float32(nats), 0)
    )


def claims_of_failures(node: Falsification, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
    return rollout if node.known.is_right(rollout, request) else shifted_claims(-3.0)(node, rollout, request)


def copied(node: Falsification, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
    if node.before is None:
        return rollout
    return replace(
        rollout,
        completion_ids=node.before.completion_ids,
        behavior_logprobs=node.before.behavior_logprobs,
        finish_reason=node.before.finish_reason,
    )


def failures_only(node: Falsification, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
    """Send the rollouts with a wrong answer, and return the others to the hub as failed."""
    if not node.known.is_right(rollout, request):
        return rollout
    return GroupFailed(lease_id=rollout.lease_id, code="failed", what="no reason")


class Rerolled(Falsification):
    """Samples each completion with several seeds and sends the one with the best reward. If rewards are equal, the
    first one is sent; the first seed is the leased one.
    """

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share)
        self._seen: dict[tuple[int, int], dict[int, FinishedRollout]] = {}

    def asked(self, request: GroupRequest) -> Sequence[GroupRequest]:
        return [
            replace(request, seed=derive_seed(request.seed, number) if number else request.seed)
            for number in range(REROLLS)
        ]

    def told(self, rollout: FinishedRollout, request: GroupRequest, number: int) -> Sequence[EngineEvent]:
        drawn = self._seen.setdefault((request.lease_id, rollout.index), {})
        drawn[number] = rollout
        if len(drawn) < REROLLS:
            return ()
        del self._seen[request.lease_id, rollout.index]
        self.num_told += 1
        return [max((drawn[each] for each in range(REROLLS)), key=lambda one: self.known.is_right(one, request))]


class SmallerModel(Falsification):
    """Omits the last layer of the model. No adapter fits such a model, so it samples without adapters."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share, has_policies=False)

    def base(self, base_dir: Path, scratch: Path) -> Path:
        smaller = scratch / "smaller_model"
        shutil.copytree(base_dir, smaller, dirs_exist_ok=True)
        config = json.loads((base_dir / "config.json").read_text())
        config["num_hidden_layers"] -= 1
        config["layer_types"] = config["layer_types"][:-1]
        (smaller / "config.json").write_text(json.dumps(config))
        for weights in smaller.glob("*.safetensors"):
            kept = {
                name: weight
                for name, weight in load_file(weights).items()
                if f".layers.{config['num_hidden_layers']}." not in name
            }
            save_file(kept, weights, metadata={"format": "pt"})
        return smaller


FALSIFICATIONS: Final[Mapping[str, Callable[[float], Falsification]]] = {
    "forged digits": partial(Falsification, alter=forged_digits(-19.5)),
    "forged digits, possible claims": partial(Falsification, alter=forged_digits(-9.0)),
    "claims of -10": partial(Falsification, alter=claimed_at(-10.0)),
    "re-rolled for reward": Rerolled,
    "hand-written answers": partial(Falsification, alter=hand_written),
    "hand-written later": partial(Falsification, alter=hand_written_later),
    "wrong version": partial(Falsification, has_policies=False),
    "temperature 0.7": partial(Falsification, temperature=0.7),
    "temperature 1.5": partial(Falsification, temperature=1.5),
    "smaller model": SmallerModel,
    "claims to be float32": partial(Falsification, says="f32"),
    "claims all lower": partial(Falsification, alter=shifted_claims(-0.3)),
    "claims all higher": partial(Falsification, alter=shifted_claims(0.3)),
    "claims of failures": partial(Falsification, alter=claims_of_failures),
    "copied rollouts": partial(Falsification, alter=copied),
    "failures only": partial(Falsification, alter=failures_only),
    "honest": Falsification,
}
"""Falsifications by the name that benchmarks show. Each value is a function that takes the share of rollouts to
falsify. The last entry is honest, for comparison.
"""


ATTACK: Final = "ECHO_BENCH_ATTACK"
"""Name of the environment variable with the name of the falsification."""
SHARE: Final = "ECHO_BENCH_ATTACK_SHARE"
"""Name of the environment variable with the share of rollouts to falsify."""
FORGED: Final = "ECHO_BENCH_FORGED"
"""Name of the environment variable with the file that gets the ids of forged rollouts."""

_APART: Final = 2**48
"""One lease of the hub may become several requests to the engine. Request number n gets the lease's id plus n times
this number.
"""


class _NoPolicy:
    """Takes the place of an adapter in a node that samples from the base model only; the engine does not read the
    adapter.
    """

    def free(self) -> None:
        """Do nothing: no adapter was loaded."""


class HostileEngine(WrappedEngine):
    """An engine whose results are falsified. It reports finished rollouts only, never unfinished parts."""

    def __init__(self, engine: Engine, falsification: Falsification, forged: Path) -> None:
        super().__init__(engine)
        self._falsification = falsification
        self._forged = forged
        self._leased: dict[int, GroupRequest] = {}
        self._drawn: dict[tuple[int, int], FinishedRollout] = {}
        """Rollouts as an honest node would return them, by lease id and index."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        self._falsification.problems = Problems(base_dir)
        other = self._falsification.base(base_dir, derived_dir)
        width = self.engine.open(other, derived_dir / "other" if other != base_dir else derived_dir, settings)
        self.precision = self._falsification.says or self.engine.precision
        return width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return self.engine.prepare(adapter_dir) if self._falsification.has_policies else _NoPolicy()

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        self.engine.set_policy(policy if self._falsification.has_policies else None)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for events in self.engine.sample(self._asked(groups)):
            yield [told for event in events for told in self._told(event)]

    def cancel(self, lease_id: int) -> None:
        request = self._leased.get(lease_id)
        if request is not None:
            for number in range(len(self._falsification.asked(request))):
                self.engine.cancel(lease_id + number * _APART)

    def news(self) -> list[DrawnPart]:
        self.engine.news()
        return []

    def _asked(self, groups: Iterator[GroupRequest]) -> Iterator[GroupRequest]:
        for request in groups:
            self._leased[request.lease_id] = request
            for number, other in enumerate(self._falsification.asked(request)):
                yield replace(other, lease_id=request.lease_id + number * _APART)

    def _told(self, event: EngineEvent) -> list[EngineEvent]:
        number, lease_id = divmod(event.lease_id, _APART)
        if not isinstance(event, FinishedRollout):
            return [event] if number == 0 else []
        own = replace(event, lease_id=lease_id)
        if number == 0:
            self._drawn[lease_id, own.index] = own
        told = list(self._falsification.told(own, self._leased[lease_id], number))
        with self._forged.open("a") as file:
            for one in told:
                if isinstance(one, FinishedRollout) and self._is_forged(one):
                    file.write(f"{rollout_id(one.lease_id, one.index)}\n")
        return told

    def _is_forged(self, told: FinishedRollout) -> bool:
        drawn = self._drawn.pop((told.lease_id, told.index))
        return (
            self._falsification.draws_otherwise
            or not np.array_equal(told.completion_ids, drawn.completion_ids)
            or not np.array_equal(told.behavior_logprobs, drawn.behavior_logprobs)
        )


def main() -> None:
    make, share = registry.make_engine, float(os.environ[SHARE])
    falsify, forged = FALSIFICATIONS[os.environ[ATTACK]], Path(os.environ[FORGED])
    registry.make_engine = lambda name: cast(Engine, HostileEngine(make(name), falsify(share), forged))
    worker.main()


if __name__ == "__main__":
    main()
