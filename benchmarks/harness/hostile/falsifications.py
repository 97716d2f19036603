"""Attacks of a hostile node: forged tokens and forged log-probabilities.

A falsification stands between a real engine and its node. The falsification may change the leased request, and may
change the drawn result. All falsifications know the built-in task, `123+456=`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file

from echo_node.backends.base import EngineEvent, GroupFailed
from echo_shared.draws import derive_seed
from echo_shared.messages import FinishReason
from echo_shared.sampling import FinishedRollout, GroupRequest

REROLLS: Final = 4
TURNS_AFTER: Final = 128
"""Honest rollouts of a node that first earns trust."""
_PROBLEM: Final = re.compile(r"(\d+)\+(\d+)=$")


class Problems:
    """Reads the built-in task from the tokens of prompts and completions."""

    def __init__(self, base_dir: Path) -> None:
        vocabulary = json.loads((base_dir / "tokenizer.json").read_text())["model"]["vocab"]
        self._ids: Mapping[str, int] = vocabulary
        self._texts = {number: text for text, number in vocabulary.items()}

    def answer(self, request: GroupRequest) -> str:
        """Return the right answer of a request's problem."""
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
        """Return the rollout with `text` as its completion. `claims` are its log-probabilities, with the stop token's
        last."""
        ids = np.array([*(self._ids[letter] for letter in text), request.stop_ids[0]], np.int32)[: request.max_tokens]
        is_whole = len(ids) == len(text) + 1
        return replace(
            rollout,
            completion_ids=ids,
            behavior_logprobs=np.array(claims[: len(ids)], np.float32),
            finish_reason=FinishReason.STOP if is_whole else FinishReason.LENGTH,
        )


class Falsification:
    """An honest node. Attacks override a method. `share` is the share of rollouts that are altered."""

    draws_otherwise = False
    """True if the engine itself draws otherwise than leased, so that every rollout is forged."""
    has_policies = True
    """False if the engine samples from the base model, whatever version it claims."""

    def __init__(self, share: float = 1.0) -> None:
        self.problems: Problems | None = None
        self.num_told = 0
        """Finished rollouts so far."""
        self._share = share
        self.says = ""
        """The precision that the node claims; empty for the engine's own."""

    def base(self, base_dir: Path, _scratch: Path) -> Path:
        """Return the directory of the model to load."""
        return base_dir

    def asked(self, request: GroupRequest) -> Sequence[GroupRequest]:
        """Return the requests that the engine gets for this lease."""
        return (request,)

    def told(self, rollout: FinishedRollout, request: GroupRequest, _number: int) -> Sequence[EngineEvent]:
        """Return the events that the node gets. `request` is the lease, `_number` the place of the request in
        `asked`."""
        self.num_told += 1
        is_altered = int(self.num_told * self._share) > int((self.num_told - 1) * self._share)
        return [self.altered(rollout, request) if is_altered else rollout]

    def altered(self, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
        return rollout

    @property
    def known(self) -> Problems:
        assert self.problems is not None, "the engine is open"
        return self.problems


class ForgedDigits(Falsification):
    """The right answer with another last digit. Its right digits are claimed at `nats`, so that the update pushes a
    good policy away from them with full force."""

    def __init__(self, nats: float, share: float = 1.0) -> None:
        super().__init__(share)
        self._nats = nats

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        answer = self.known.answer(request)
        wrong = answer[:-1] + str((int(answer[-1]) + 1) % 10)
        return self.known.written(rollout, request, wrong, [*[self._nats] * (len(wrong) - 1), -0.1, -0.1])


class UnlikelyClaims(Falsification):
    """Honest draws, each token claimed at -10 nats."""

    def altered(self, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
        return replace(rollout, behavior_logprobs=np.full_like(rollout.behavior_logprobs, -10.0))


class HandWritten(Falsification):
    """The right answer, claimed as likely."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        answer = self.known.answer(request)
        return self.known.written(rollout, request, answer, [-0.1] * (len(answer) + 1))


class HandWrittenLater(HandWritten):
    """Honest for the first `TURNS_AFTER` rollouts."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        return rollout if self.num_told <= TURNS_AFTER else super().altered(rollout, request)


class Rerolled(Falsification):
    """Draws each completion with several seeds and sends one with the best reward, preferably that of the leased
    seed."""

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


class Copied(Falsification):
    """Sends the previous rollout again in place of each rollout."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share)
        self._before: FinishedRollout | None = None

    def altered(self, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
        before, self._before = self._before, rollout
        if before is None:
            return rollout
        return replace(
            rollout,
            completion_ids=before.completion_ids,
            behavior_logprobs=before.behavior_logprobs,
            finish_reason=before.finish_reason,
        )


class FailuresOnly(Falsification):
    """Sends rollouts without reward, and gives back the others."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        if not self.known.is_right(rollout, request):
            return rollout
        return GroupFailed(lease_id=rollout.lease_id, code="failed", what="no reason")


class OtherTemperature(Falsification):
    """Samples at `factor` times the temperature, and claims those log-probabilities."""

    draws_otherwise = True

    def __init__(self, factor: float, share: float = 1.0) -> None:
        super().__init__(share)
        self._factor = factor

    def asked(self, request: GroupRequest) -> Sequence[GroupRequest]:
        return (replace(request, temperature=request.temperature * self._factor),)


class OldVersion(Falsification):
    """Samples from the base model, whatever version it claims."""

    draws_otherwise = True
    has_policies = False


class OtherPrecision(Falsification):
    """Claims that the engine computes in float32."""

    draws_otherwise = True

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share)
        self.says = "f32"


class SmallerModel(Falsification):
    """Leaves out the last layer of the model. No adapter fits it, so adapters are left out too."""

    draws_otherwise = True
    has_policies = False

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


class ShiftedClaims(Falsification):
    """Honest draws. Each log-probability is claimed `nats` too high."""

    def __init__(self, nats: float, share: float = 1.0) -> None:
        super().__init__(share)
        self._nats = nats

    def altered(self, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
        return replace(rollout, behavior_logprobs=np.minimum(rollout.behavior_logprobs + np.float32(self._nats), 0))


class ClaimsOfFailures(ShiftedClaims):
    """Shifted claims of rollouts with a wrong answer."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        return rollout if self.known.is_right(rollout, request) else super().altered(rollout, request)


FALSIFICATIONS: Final[Mapping[str, Callable[[float], Falsification]]] = {
    "forged digits": partial(ForgedDigits, -19.5),
    "forged digits, possible claims": partial(ForgedDigits, -9.0),
    "claims of -10": UnlikelyClaims,
    "re-rolled for reward": Rerolled,
    "hand-written answers": HandWritten,
    "hand-written later": HandWrittenLater,
    "wrong version": OldVersion,
    "temperature 0.7": partial(OtherTemperature, 0.7),
    "temperature 1.5": partial(OtherTemperature, 1.5),
    "smaller model": SmallerModel,
    "claims to be float32": OtherPrecision,
    "claims all lower": partial(ShiftedClaims, -0.3),
    "claims all higher": partial(ShiftedClaims, 0.3),
    "claims of failures": partial(ClaimsOfFailures, -3.0),
    "copied rollouts": Copied,
    "failures only": FailuresOnly,
    "honest": Falsification,
}
"""By the name that benchmarks show. Each is made with the share of rollouts to falsify. The last one is the
reference."""
