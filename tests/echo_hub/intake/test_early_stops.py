from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.intake.early_stops import EarlyStops
from echo_hub.intake.partials import Partials
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.asked import AskedGroup, AskedGroups, GroupBounds
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.stop_strings import StopStrings
from echo_shared.wire.messages import FinishReason, LeasedPrefix, Rollout, RolloutPart

CODEC = PromptCodec.load(resolve_base("builtin:tiny"))


def ids(text: str) -> np.ndarray:
    return CODEC.encode_prompt(text)


class Drawing:
    """A hub whose node a draws index 0 of lease 7. The completion belongs to a tenant's request with the stop strings
    `stops` ("cd" by default), or to the run.
    """

    def __init__(self, *stops: str, group_id: int = FIRST_ANSWER_ID, given: str = "", again: bool = False) -> None:
        asked = AskedGroups()
        sampling = SamplingParameters(temperature=0.5, max_tokens=90, stop_strings=stops or ("cd",))
        asked.add(FIRST_ANSWER_ID, AskedGroup(prompt_ids=ids("x"), seed=1, sampling=sampling))
        of_run = SamplingBounds(
            vocabulary_size=CODEC.num_ids,
            max_tokens=90,
            stop_ids=frozenset(),
            stop_strings=StopStrings(("cd",), CODEC),
        )
        bounds = GroupBounds(of_run, asked)
        self.partials = Partials(bounds)
        before = ids(given) if given else ids("x")[:0]
        prefix = LeasedPrefix(index=0, ids=before, logprobs=np.zeros(len(before), np.float32))
        self.partials.leased("a", 7, (0,), [prefix] * bool(given), group_id=group_id, policy_version=3, again=again)
        self.stops = EarlyStops(self.partials, bounds, asked)

    def sends(self, text: str, node_id: str = "a", start: int | None = None) -> list[Rollout]:
        partial = self.partials.streamed("a", 7, 0)
        if start is None:
            start = 0 if partial is None else partial[1].num_tokens
        drawn = ids(text)
        logprobs = np.full(len(drawn), -0.5, np.float32)
        part = RolloutPart(lease_id=7, index=0, start=start, policy_version=3, ids=drawn, logprobs=logprobs)
        self.partials.take(node_id, [part])
        return list(self.stops.ended(node_id, [part]))


@pytest.mark.parametrize("parts", [("abcdef",), ("ab", "c", "def"), ("abc", "d")])
def test_a_stop_string_in_streamed_tokens_ends_a_completion(parts: Sequence[str]) -> None:
    drawing = Drawing()
    *before, found = [drawing.sends(part) for part in parts]
    assert not any(before)
    (ended,) = found
    assert CODEC.text(ended.completion_ids) == "".join(parts)
    assert (ended.rollout_id, ended.group_id, ended.index, ended.num_given) == ("7-0", FIRST_ANSWER_ID, 0, 0)
    assert ended.finish_reason is FinishReason.STOP and len(ended.behavior_logprobs) == len(ended.completion_ids)
    assert drawing.partials.finish("a", ended).problem == ""
    assert drawing.sends("cd") == [], "the lease is over"


def test_tokens_of_an_earlier_node_are_part_of_the_completion() -> None:
    drawing = Drawing(given="abc")
    (ended,) = drawing.sends("d")
    assert (CODEC.text(ended.completion_ids), ended.num_given) == ("abcd", 3)
    assert drawing.partials.finish("a", ended).problem == ""


@pytest.mark.parametrize(
    "drawing",
    [Drawing("no"), Drawing(group_id=4), Drawing(again=True)],
    ids=["another string", "the run's own", "first tokens unknown"],
)
def test_all_other_completions_end_when_their_nodes_return_them(drawing: Drawing) -> None:
    assert drawing.sends("abcdef") == []


def test_a_refused_part_ends_nothing() -> None:
    drawing = Drawing()
    assert drawing.sends("cd", node_id="b") == []
    assert drawing.sends("cd", start=5) == []
    assert drawing.sends("ab") == []
