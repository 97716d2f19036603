"""One episode of a verifiers environment: the turns that its agent asks for, and their answers.

verifiers' own loop runs the agent, and posts the token ids so far whenever it wants a turn. Example of two turns:

    POST token_ids = P            first prompt P: `next()` gives P to the hub
    answer(C1)                    the policy's turn C1: the POST gets it
    POST token_ids = P C1 O1      `next()` gives O1, the ids that the environment has added
    answer(C2)                    the POST gets it
    the run ends                  `next()` gives the ending, after `trace` was compared with P C1 O1 C2

This module imports the standard library only. Sockets and processes are in `verifiers_server` and `verifiers_worker`.
"""

from __future__ import annotations

import asyncio
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MOST_COMPONENTS: Final = 24
NAME_LENGTH: Final = 32
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "n": (None, 1),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "reasoning_effort": (None,),
    "logprobs": (None, 0, 1),
    "skip_special_tokens": (None, False),
}
"""For each sampling parameter, the values in a request that leave the sampling unchanged, so that the hub may ignore
them."""
WITHOUT_EFFECT: Final = frozenset({"routed_experts_prompt_start", "seed"})


class Untrainable(Exception):
    """The episode cannot be trained on. The text says why, for the operator."""

    code = "episode_refused"


class RunLost(Exception):
    """The episode is lost: its run, its agent or its worker process has failed. The text says why."""

    code = "session_gone"


@dataclass(frozen=True, kw_only=True)
class DrawRules:
    """How the hub's run samples turns. A request of an agent that wants anything else is refused."""

    stop_ids: frozenset[int]
    max_tokens: int
    temperature: float
    vocabulary: int
    """Number of token ids in the model's vocabulary."""


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """What verifiers' record of a finished run says about the episode."""

    error: str = ""
    """Why the run failed; "" if verifiers scored it."""
    branches: int = 1
    ids: Sequence[int] = ()
    """Token ids of the trace's only branch, joined."""
    mask: Sequence[bool] = ()
    """For each id: True if the policy drew it."""
    logprobs: Sequence[float] = ()
    """For each id: its log-probability if the policy drew it, else 0."""
    reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name, before they are multiplied by their weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class VerifiersEpisode:
    """The turns of one run of verifiers' agent. Used on one event loop."""

    def __init__(self, rules: DrawRules) -> None:
        self._rules = rules
        self._known: list[int] = []
        """All ids so far: prompt, turns and what the environment added between them."""
        self._turns: list[tuple[int, int, list[float]]] = []
        """Start and end of each turn in `_known`, and its log-probabilities."""
        self._answers: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        """Answer to each request of the agent, by the request's token ids."""
        self._asking: asyncio.Future[dict[str, Any]] | None = None
        self._news: asyncio.Queue[list[int] | TraceFacts | Exception] = asyncio.Queue()
        self._is_full = False
        self.refusal = ""
        """Why the episode was refused; "" if it was not."""
        self.traces: set[str] = set()
        """Ids of the run's traces so far."""

    def traced(self, trace: str, *, seat: str, is_trained: bool) -> None:
        """Record a new trace, the log of one agent (`seat`). Refuse the episode unless it has exactly one agent, and
        this one is trained.
        """
        self.traces.add(trace)
        if not is_trained:
            self.refuse(
                f"The seat {seat} is not trained, but asks the trained policy. Give it a model and a client of its "
                f"own, in the options env.{seat}.model and env.{seat}.client."
            )
        elif len(self.traces) > 1:
            self.refuse("Several agents play in one episode. Only environments with one trained seat can be used.")

    async def asked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until the policy has drawn the turn that a request wants, and return it. The same request gets the same
        answer again.

        Raises Untrainable if the episode cannot be trained on, and ContextFull after `cut`.
        """
        if self.refusal:
            raise Untrainable(self.refusal)
        if self._is_full:
            raise ContextFull
        ids = body.get("token_ids")
        digest = _digest(ids)
        answer = self._answers.get(digest)
        if answer is None:
            if problem := self._problem(ids, body):
                self.refuse(problem)
                raise Untrainable(problem)
            answer = self._answers[digest] = asyncio.get_running_loop().create_future()
            self._asking = answer
            assert isinstance(ids, list)
            added, self._known = ids[len(self._known) :], list(ids)
            self._news.put_nowait(added)
        return await asyncio.shield(answer)

    def _problem(self, ids: object, body: Mapping[str, Any]) -> str:
        """Return why a new request must be refused; "" if it asks for the episode's next turn."""
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            return "A request has no token ids."
        if not 0 <= min(ids) <= max(ids) < self._rules.vocabulary:
            return (
                f"A request has the token id {max(ids)}, but the base model has {self._rules.vocabulary} ids. "
                "Choose the renderer of this model by the option renderer."
            )
        if self._asking is not None:
            return "The agent asks for two turns at the same time. Branches are not supported."
        if ids[: len(self._known)] != self._known:
            pairs = enumerate(zip(ids, self._known, strict=False))
            place = next((at for at, (new, old) in pairs if new != old), len(ids))
            return (
                f"A request differs from the episode's token ids at place {place} of {len(self._known)}: the agent has "
                "rewritten its history. Branches are not supported."
            )
        if self._turns and len(ids) == len(self._known):
            return "A request adds no token id after the last turn."
        return self._foreign(body.get("sampling_params"), body)

    def _foreign(self, given: object, body: Mapping[str, Any]) -> str:
        """Return the parameter of a request that the run cannot follow, as text; "" if there is none."""
        if unknown := {"features", "content_parts"} & body.keys():
            return f"A request has {', '.join(sorted(unknown))}: images are not supported."
        sampling = dict(given) if isinstance(given, Mapping) else {}
        temperature, most = sampling.pop("temperature", None), sampling.pop("max_tokens", None)
        if temperature is not None and temperature != self._rules.temperature:
            return f"A request wants temperature {temperature}, but the run draws with {self._rules.temperature}."
        if most is not None and most != self._rules.max_tokens:
            return f"A request wants at most {most} tokens, but the run draws at most {self._rules.max_tokens}."
        stops = sampling.pop("stop_token_ids", None) or []
        if strange := sorted(set(stops) - self._rules.stop_ids):
            return (
                f"A request wants to stop at the token ids {strange}, but the run stops at "
                f"{sorted(self._rules.stop_ids)}. Add them to eos_token_id in the base model's generation_config.json."
            )
        for name, value in sampling.items():
            if name not in WITHOUT_EFFECT and value not in NEUTRAL.get(name, (None,)):
                return f"A request wants {name} = {value}, with which the run does not draw."
        return ""

    def answer(self, ids: Sequence[int], logprobs: Sequence[float], finish_reason: str) -> None:
        """Give the drawn turn to the request that waits for it. Raises RunLost if no request waits, and Untrainable if
        the turn cannot be used."""
        if self.refusal:
            raise Untrainable(self.refusal)
        if self._asking is None:
            raise RunLost("The agent waits for no turn.")
        start = len(self._known)
        drawn = [float(one) for one in logprobs] or [0.0] * len(ids)
        self._known += ids
        self._turns.append((start, len(self._known), drawn))
        asking, self._asking = self._asking, None
        content = [
            {"token": f"token_id:{token_id}", "logprob": logprob} for token_id, logprob in zip(ids, drawn, strict=True)
        ]
        choice = {"token_ids": list(ids), "finish_reason": finish_reason, "logprobs": {"content": content}}
        asking.set_result({"request_id": f"turn-{len(self._turns)}", "choices": [{"index": 0, **choice}]})

    def cut(self) -> None:
        """Tell the agent that the context is full. The agent then ends its run, and verifiers scores the run."""
        self._is_full = True
        self._release(ContextFull())

    def refuse(self, why: str) -> None:
        """End the episode, because it cannot be trained on."""
        if not self.refusal:
            self.refusal = why
            self._release(Untrainable(why))
            self._news.put_nowait(Untrainable(why))

    def close(self) -> None:
        """Fail the request that waits for a turn, if any, and refuse all later ones."""
        self.refusal = self.refusal or "The episode was closed."
        self._release(Untrainable(self.refusal))

    def _release(self, error: Exception) -> None:
        """Fail the request that waits for a turn with this error."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.set_exception(error)
            asking.exception()  # Mark it as retrieved: the agent may be gone.

    def failed(self, why: str) -> None:
        self._news.put_nowait(RunLost(why))

    def finished(self, facts: TraceFacts) -> None:
        """Record the end of the run."""
        self._news.put_nowait(facts)

    async def next(self) -> list[int] | dict[str, Any]:
        """Return what comes after the last turn: the ids that the environment added, or the ending.

        Raises Untrainable and RunLost.
        """
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        if isinstance(news, list):
            return news
        if news.error:
            raise RunLost(news.error)
        if difference := self._difference(news):
            raise Untrainable(difference)
        return _ending(news)

    def _difference(self, facts: TraceFacts) -> str:
        """Return how the run's trace differs from the turns that were drawn; "" if it does not."""
        if not self._turns:
            raise RunLost("The run has ended before it asked for a turn.")
        if facts.branches != 1:
            return f"The trace has {facts.branches} branches. Branches are not supported."
        end = self._turns[-1][1]
        mask, logprobs = [False] * end, [0.0] * end
        for start, stop, drawn in self._turns:
            mask[start:stop], logprobs[start:stop] = [True] * (stop - start), drawn
        if list(facts.ids) != self._known[:end]:
            return "The token ids of the trace are not those of the turns."
        if list(facts.mask) != mask or list(facts.logprobs) != logprobs:
            return "The trace has another mask or other log-probabilities than the turns."
        return ""


class ContextFull(Exception):
    """The context has no room for another turn, so the agent's request fails."""


def _digest(ids: object) -> bytes:
    try:
        return array("q", ids).tobytes() if isinstance(ids, list) else b""
    except (TypeError, OverflowError):
        return b""


def _ending(facts: TraceFacts) -> dict[str, Any]:
    """Return the ending of the episode: its reward, and its components (first the rewards by name, then the
    metrics)."""
    components: dict[str, float] = {}
    for name, value in (*facts.rewards.items(), *facts.metrics.items()):
        if len(components) < MOST_COMPONENTS and math.isfinite(value):
            components[_free_name(name, components)] = float(value)
    return {"reward": facts.reward, "components": components}


def _free_name(name: str, taken: Mapping[str, float]) -> str:
    """Return the name as a component's name may be: letters, digits and underscores, and neither "score" nor taken."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    plain = (plain if plain[:1].isalpha() else f"m_{plain}")[:NAME_LENGTH]
    number, found = 2, plain
    while found in taken or found == "score":
        found = f"{plain[: NAME_LENGTH - 3]}_{number}"
        number += 1
    return found
