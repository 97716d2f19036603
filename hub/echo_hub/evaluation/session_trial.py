"""Trial of an environment with state: whole episodes in which every turn gives the same answer.

The trial shows the prompt, each observation and the reward, as `echo_hub.scoring.trial` does for tasks without state.
Sessions are played by the session host, one episode at a time, on the first training problems.
"""

from __future__ import annotations

import asyncio

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.by_hand import ListedReplies, play_by_hand
from echo_hub.evaluation.by_hub import AnswerScorer, EpisodeJudge
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.trial import (
    MOST_TURNS,
    AnswerKind,
    Trial,
    TriedAnswer,
    TriedProblem,
    tried_answers,
    warnings_of,
)
from echo_shared.records.rewards import components_of


async def try_sessions(
    config: HubConfig, problems: Problems, *, judge: AnswerScorer | EpisodeJudge, count: int
) -> Trial:
    """Try the first `count` training problems of a run's only task, which has state.

    Raises the errors of sampling problems.
    """
    codec, bounds = problems.codec, problems.tasks[""].rewards
    sampled = await asyncio.to_thread(lambda: [problems.training_problem(number) for number in range(count)])
    references = [None if (answer := each.metadata.get("answer")) is None else str(answer) for each in sampled]
    tried = []
    for number, problem in enumerate(sampled):
        texts = tried_answers(number, problem.prompt, references, number)
        prompt_ids = await asyncio.to_thread(problems.prompt_ids, number)
        tried.append(
            TriedProblem(
                seed=number,
                prompt=problem.prompt,
                rendered=codec.text(prompt_ids),
                prompt_tokens=len(prompt_ids),
                reference=references[number],
                reading="",
                answers=tuple(
                    [
                        await _tried(config, problems, kind, text, judge=judge, number=number, index=index)
                        for index, (kind, text) in enumerate(texts.items())
                    ]
                ),
            )
        )
    warnings = warnings_of(config, bounds, codec, tried, is_repeatable=None)
    return Trial(task=config.task.name, base=config.model.base, bounds=bounds, problems=tuple(tried), warnings=warnings)


async def _tried(
    config: HubConfig,
    problems: Problems,
    kind: AnswerKind,
    text: str,
    *,
    judge: AnswerScorer | EpisodeJudge,
    number: int,
    index: int,
) -> TriedAnswer:
    source = ListedReplies([text] * MOST_TURNS)
    played = await play_by_hand(config, problems, source=source, judge=judge, number=number, index=index)
    endless = "" if played.has_ended else f"The episode has not ended after {MOST_TURNS} turns."
    return TriedAnswer(
        kind=kind,
        text=text,
        reward=played.reward,
        error=played.error or endless,
        turns=len(played.turns),
        components=None if played.reward is None else components_of(played.reward),
    )
