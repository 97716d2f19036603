from __future__ import annotations

from echo_hub.evaluation.by_hub import Episode
from echo_hub.evaluation.turns_in_words import turns_in_words
from echo_shared.records.rollout import CallMade, ObservedMessage
from tests.echo_hub.run.test_chat_template import QWEN3, RESULT, TOOL, codec_of

CODEC = codec_of(QWEN3).with_tools([TOOL])
CALL = 'I call. <tool_call>{"name": "calculate", "arguments": {"expression": "12*34"}}</tool_call>'


def played(*, reward: float | None) -> Episode:
    """Return an episode of two turns: a tool call with its result, and an answer."""
    episode = Episode(number=0, index=0, prompt_ids=CODEC.encode_prompt("12 * 34?"), reward=reward)
    episode.turns.append(CODEC.encode_reply(CALL))
    episode.go_on(CODEC.encode_answer([RESULT], after=CODEC.end_of_reply), -0.25)
    episode.turns.append(CODEC.encode_reply("408"))
    return episode


def test_calls_results_and_rewards_are_told_by_turn() -> None:
    first, last = turns_in_words(played(reward=1.0), CODEC)
    assert (first.reply, first.reward) == (CALL, -0.25)
    assert first.calls == (CallMade(name="calculate", arguments='{"expression": "12*34"}'),)
    assert first.messages == (ObservedMessage(role="tool", text="408"),)
    assert (last.reply, last.reward, last.calls, last.messages) == ("408", 1.25, (), ())
    assert last.num_tokens == len(CODEC.encode_reply("408"))


def test_an_episode_without_a_reward_has_none_for_its_last_turn() -> None:
    assert [turn.reward for turn in turns_in_words(played(reward=None), CODEC)] == [-0.25, None]


def test_an_answer_without_a_next_turn_is_shown_too() -> None:
    episode = played(reward=None)
    episode.go_on(CODEC.encode_answer([{"role": "user", "content": "more?"}], after=CODEC.end_of_reply), 0.5)
    assert turns_in_words(episode, CODEC)[1].messages == (ObservedMessage(role="user", text="more?"),)
