"""What hostile nodes do to the work of their own engines: each attack on the tokens or the claims of a rollout.

A falsification stands between a real engine and its node: it may ask the engine for something else than what was
leased, and tell the node something else than what was drawn. All of them know the built-in task, `123+456=`.
"""

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
from echo_shared.scoring import Intervals

REROLLS: Final = 4
TURNS_AFTER: Final = 128
"""Rollouts for which a node is honest that wants to be trusted first."""
_PROBLEM: Final = re.compile(r"(\d+)\+(\d+)=$")


class Problems:
    """The built-in task as a hostile node reads it off the tokens that it is sent."""

    def __init__(self, base_dir: Path) -> None:
        vocabulary = json.loads((base_dir / "tokenizer.json").read_text())["model"]["vocab"]
        self._ids: Mapping[str, int] = vocabulary
        self._texts = {number: text for text, number in vocabulary.items()}

    def answer(self, request: GroupRequest) -> str:
        """The right one."""
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
        """The rollout with this text in place of what was drawn; `claims`: its log-probabilities, the stop token's
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
    """An honest node; attacks change one of its methods. `share`: of the rollouts, those that are altered."""

    draws_otherwise = False
    """Whether the engine itself draws other than was leased, so that all that it draws is forged."""
    has_policies = True
    """Else the engine draws by the base model alone, whatever version it says."""

    def __init__(self, share: float = 1.0) -> None:
        self.problems: Problems | None = None
        self.num_told = 0
        """Rollouts that the engine has finished."""
        self._share = share
        self.says = ""
        """The precision that the node claims to have; empty = the engine's own."""

    def base(self, base_dir: Path, _scratch: Path) -> Path:
        """The model that is loaded in place of the run's."""
        return base_dir

    def asked(self, request: GroupRequest) -> Sequence[GroupRequest]:
        """What the engine draws for this lease."""
        return (request,)

    def told(self, rollout: FinishedRollout, request: GroupRequest, _number: int) -> Sequence[EngineEvent]:
        """What the node is told that was drawn. `request`: as leased; `_number`: which of `asked` it is."""
        self.num_told += 1
        is_altered = int(self.num_told * self._share) > int((self.num_told - 1) * self._share)
        return [self.altered(rollout, request) if is_altered else rollout]

    def altered(self, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
        return rollout

    def found(self, intervals: Intervals) -> Intervals:
        """What the node says that it found of another's completion."""
        return intervals

    @property
    def known(self) -> Problems:
        assert self.problems is not None, "the engine is open"
        return self.problems


class ForgedDigits(Falsification):
    """The right answer with another last digit, and its right digits claimed at so many nats: a policy that holds them
    for likely is pushed away from them with all force."""

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
    """Honest at first."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        return rollout if self.num_told <= TURNS_AFTER else super().altered(rollout, request)


class Rerolled(Falsification):
    """Draws each completion with several seeds and sends the one with the best reward, if it can that of the lease."""

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
    """Sends, for every prompt and index, what another rollout was some time ago."""

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
    """Sends what earned nothing, and gives back the rest."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        if not self.known.is_right(rollout, request):
            return rollout
        return GroupFailed(lease_id=rollout.lease_id, code="failed", what="no reason")


class OtherTemperature(Falsification):
    """Draws, and claims, at `factor` times the temperature."""

    draws_otherwise = True

    def __init__(self, factor: float, share: float = 1.0) -> None:
        super().__init__(share)
        self._factor = factor

    def asked(self, request: GroupRequest) -> Sequence[GroupRequest]:
        return (replace(request, temperature=request.temperature * self._factor),)


class OldVersion(Falsification):
    """Draws by the base model, the oldest version of all, whatever version it says."""

    draws_otherwise = True
    has_policies = False


class OtherPrecision(Falsification):
    """Says that the engine computes in float32, whatever it does."""

    draws_otherwise = True

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share)
        self.says = "f32"


class SmallerModel(Falsification):
    """Leaves out the model's last layer, and with it all adapters, which do not fit."""

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
    """Honest draws, whose tokens are claimed to be likelier, or less likely, by so many nats."""

    def __init__(self, nats: float, share: float = 1.0) -> None:
        super().__init__(share)
        self._nats = nats

    def altered(self, rollout: FinishedRollout, _request: GroupRequest) -> EngineEvent:
        return replace(rollout, behavior_logprobs=np.minimum(rollout.behavior_logprobs + np.float32(self._nats), 0))


class ClaimsOfFailures(ShiftedClaims):
    """The same, where the answer is wrong."""

    def altered(self, rollout: FinishedRollout, request: GroupRequest) -> EngineEvent:
        return rollout if self.known.is_right(rollout, request) else super().altered(rollout, request)


class Accuses(Falsification):
    """Draws honestly, and says of a share of others' completions that their draws fell elsewhere."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__(share)
        self._num_found = 0

    def told(self, rollout: FinishedRollout, _request: GroupRequest, _number: int) -> Sequence[EngineEvent]:
        return [rollout]

    def found(self, intervals: Intervals) -> Intervals:
        self._num_found += 1
        if int(self._num_found * self._share) == int((self._num_found - 1) * self._share):
            return intervals
        below, logprobs = intervals
        return (below + 0.5) % 1.0, logprobs


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
"""By name, as benchmarks show them, each of a share of rollouts; the last one is what they are compared with."""
AS_CHECKERS: Final[Mapping[str, Callable[[float], Falsification]]] = {"accuses": Accuses}
"""What a node says of others' work, where nodes check each other."""
