"""The reward of an answer: a single score, or a weighted sum of components with bounds.

    reward = sum of weight * value, over all components

For example, let the weights be {score = 1.0, format = 0.2}. Then a right answer in a wrong form earns 1.0, a wrong
answer in the right form earns 0.2, and rewards range from 0 to 1.2. The task's own reward is the component `score`.
Without other components and weights, the reward equals the score.

If a component with a weight is outside its bounds (by default 0..1), the scorer counts as failed. A component without a
weight may be any finite number.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from echo_hub.config.reward_section import FORMAT, LENGTH, TAGGED, RewardConfig
from echo_hub.tasks.base import ExplainedTask, MeasuredTask, Problem, Task, WeighedTask
from echo_hub.tasks.components import Format, Length, Tagged, TextComponent
from echo_hub.tasks.environments.base import AnyEnvironment, Ending
from echo_hub.tasks.rewards import COMPONENT_NAME, MAX_REWARD, SCORE, RewardBounds
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.records.rewards import Reward

MOST_COMPONENTS: Final = 32
_ANY: Final = RewardBounds(lowest=-MAX_REWARD, highest=MAX_REWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """Weights and bounds of the reward components of a task; create it with `of`."""

    of_score: RewardBounds
    rewards: RewardBounds
    """Bounds of the weighted reward."""
    weights: Mapping[str, float]
    """Weights of the components that have one, by name."""
    bounds: Mapping[str, RewardBounds]
    """Bounds of all components that are known before scoring, by name."""
    beside: Mapping[str, TextComponent]
    """Components that the settings add to the task's own, by name. The hub computes them from a completion's text."""
    judged: frozenset[str]
    """Names of the reward components that judges (models or services that rate a completion) compute, after all other
    components.
    """
    is_plain: bool
    """True if the reward is the score alone: no other component has a weight, and the settings add no component."""
    explained: Callable[[Problem, str], Mapping[str, float]] | None
    """Returns the task's own components; None if it has none."""

    @classmethod
    def of(cls, task: Task | AnyEnvironment, config: RewardConfig) -> Weighing:
        """Combine a task with the settings. Raises ConfigError for invalid bounds, and for a weight of an unknown
        component."""
        of_score = RewardBounds.of(task)
        weights, own = _weights(task, config), _own_bounds(task)
        beside = _beside(config)
        judged = {
            name: RewardBounds(lowest=lowest, highest=highest)
            for name, judge in config.judges.items()
            for lowest, highest in [judge.bounds]
        }
        if twice := own.keys() & {SCORE, *beside, *judged}:
            raise ConfigError(
                "A component of the task has a name that another one has.",
                got=f"{', '.join(sorted(twice))} of {task.name}",
                do=f"Give it another name than {SCORE} and those of the settings under [reward].",
            )
        known = {SCORE: of_score, **own, **dict.fromkeys(beside, RewardBounds()), **judged}
        tells = isinstance(task, ExplainedTask | AnyEnvironment)
        unknown = weights.keys() - known.keys()
        if unknown and (isinstance(task, MeasuredTask) or not tells):
            raise ConfigError(
                "A weight in the settings is for a component that the task does not have.",
                got=f"reward.weights = {dict(weights)}; {task.name} has {', '.join(known)}",
                do="Name one of these, or take it out.",
            )
        is_plain = weights == {SCORE: 1.0} and not beside and not judged
        rewards = of_score if is_plain else _total_bounds(weights, {**dict.fromkeys(unknown, RewardBounds()), **known})
        return cls(
            of_score=of_score,
            rewards=rewards,
            weights=weights,
            bounds=known,
            beside=beside,
            judged=frozenset(judged),
            is_plain=is_plain,
            explained=task.components if isinstance(task, ExplainedTask) else None,
        )

    def scored(self, task: Task, problem: Problem, completion: str, num_tokens: int) -> float | dict[str, float]:
        """Return a completion's score, or all its components before weighing, except those of judges.

        Raises the task's own errors, and ScorerError for an invalid value.
        """
        score = task.score(problem, completion)
        more = {} if self.explained is None else self.explained(problem, completion)
        return self._checked(score, more, completion, num_tokens)

    def ended(self, ending: Ending, replies: Sequence[str], num_tokens: int) -> float | dict[str, float]:
        """Like `scored`, but for an episode that has ended. The components for form and length judge its last turn."""
        return self._checked(ending.reward, ending.components, replies[-1], num_tokens)

    def cut(self, reward: float, replies: Sequence[str], num_tokens: int) -> float | dict[str, float]:
        """Like `scored`, but for an episode that ended because the context lacks space for another turn. The task's own
        components get their lowest values."""
        lowest = {name: self.bounds.get(name, RewardBounds()).lowest for name in self.weights}
        others = {SCORE, *self.beside, *self.judged}
        own = {name: value for name, value in lowest.items() if name not in others}
        return self._checked(reward, own, replies[-1], num_tokens)

    def total(self, given: float | Mapping[str, float]) -> float:
        """Return the weighted reward, with its components attached if there are any."""
        if not isinstance(given, Mapping):
            return given
        value = math.fsum(weight * given[name] for name, weight in self.weights.items())
        return Reward(min(max(value, self.rewards.lowest), self.rewards.highest), given)

    def _checked(
        self, score: object, more: Mapping[str, Any], completion: str, num_tokens: int
    ) -> float | dict[str, float]:
        read = self.of_score.read(score)
        if self.is_plain and not more and isinstance(more, Mapping):
            return read
        if not isinstance(more, Mapping) or len(more) > MOST_COMPONENTS:
            raise ScorerError(f"The components are {reprlib.repr(more)}, not a map of at most {MOST_COMPONENTS} names.")
        found = {SCORE: read}
        for name, given in more.items():
            found[self._new_name(name, found)] = self._read(name, given)
        for name, component in self.beside.items():
            found[name] = component.value(completion, num_tokens)
        if lacking := self.weights.keys() - found.keys() - self.judged:
            raise ScorerError(f"The scorer gave no component {', '.join(sorted(lacking))}, which has a weight.")
        return found

    def _new_name(self, name: object, found: Mapping[str, float]) -> str:
        is_taken = name in found or name in self.beside or name in self.judged
        if not isinstance(name, str) or not COMPONENT_NAME.match(name) or is_taken:
            raise ScorerError(f"{reprlib.repr(name)} cannot be the name of a component of the task's own.")
        return name

    def _read(self, name: str, given: object) -> float:
        default = RewardBounds() if name in self.weights else _ANY
        try:
            return self.bounds.get(name, default).read(given)
        except ScorerError as error:
            raise ScorerError(f"The component {name}: {error.what}") from error


def _weights(task: Task | AnyEnvironment, config: RewardConfig) -> dict[str, float]:
    own = dict(task.component_weights) if isinstance(task, WeighedTask) else {SCORE: 1.0}
    try:
        chosen = RewardConfig.model_validate({**config.model_dump(), "weights": {**own, **config.weights}}).weights
    except ValueError as error:
        raise ConfigError(
            "The weights of the task's reward components are not valid.",
            got=f"component_weights = {reprlib.repr(own)} of {task.name}",
            do="Give a number from -1000 to 1000 to each name.",
        ) from error
    return {name: weight for name, weight in chosen.items() if weight}


def _own_bounds(task: Task | AnyEnvironment) -> dict[str, RewardBounds]:
    declared: object = task.component_bounds if isinstance(task, MeasuredTask) else {}
    found = {}
    for name, bounds in declared.items() if isinstance(declared, Mapping) else [(None, declared)]:
        match bounds:
            case (int() | float() as low, int() | float() as high) if -MAX_REWARD <= low < high <= MAX_REWARD:
                if isinstance(name, str) and COMPONENT_NAME.match(name):
                    found[name] = RewardBounds(lowest=float(low), highest=float(high))
                    continue
        raise ConfigError(
            "The bounds of the task's reward components are not valid.",
            got=f"component_bounds = {reprlib.repr(declared)} of {task.name}",
            do='Map each name, letters and digits, to its lowest and highest value: {"language": (0.0, 1.0)}.',
        )
    return found


def _beside(config: RewardConfig) -> dict[str, TextComponent]:
    made: dict[str, TextComponent] = {}
    for name in config.names:
        if name == FORMAT:
            made[name] = Format.of(config.format)
        elif name == TAGGED:
            made[name] = Tagged(config.tagged)
        elif name == LENGTH:
            made[name] = Length(least=config.length_least, most=config.length_most, zero=config.length_zero)
    return made


def _total_bounds(weights: Mapping[str, float], bounds: Mapping[str, RewardBounds]) -> RewardBounds:
    ends = [sorted((w * bounds[name].lowest, w * bounds[name].highest)) for name, w in weights.items()]
    lowest, highest = math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)
    if not -MAX_REWARD <= lowest < highest <= MAX_REWARD:
        raise ConfigError(
            "These weights make all rewards equal, or too large.",
            got=f"reward.weights = {dict(weights)}: rewards from {lowest:g} to {highest:g}",
            do=f"Give one of them a weight that is not 0, and all such that rewards are at most {MAX_REWARD:,.0f}.",
        )
    return RewardBounds(lowest=lowest, highest=highest, of_score=bounds[SCORE])
