from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_hub.commands.typed_replies import TypedReplies
from echo_shared.sampling.interface import GroupRequest
from tests.echo_hub.run.test_chat_template import QWEN3, codec_of

CODEC = codec_of(QWEN3)


def request(prompt_ids: NDArray[np.int32]) -> GroupRequest:
    return GroupRequest(
        lease_id=0,
        group_id=0,
        indices=(0,),
        prompt_ids=prompt_ids,
        seed=0,
        policy_version=0,
        temperature=1.0,
        max_tokens=64,
        stop_ids=CODEC.stop_ids,
    )


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines that a person types, in order; after them, the input ends."""
    lines: list[str] = []

    def line(_prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", line)
    yield lines


def test_a_person_sees_the_prompt_then_only_what_is_new(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    typed += ["first", "second \\", "in two lines"]
    ask, prompt = TypedReplies(CODEC), CODEC.encode_prompt("How many?")
    assert ask.reply(request(prompt)) == "first"
    assert "How many?" in capsys.readouterr().out
    observed = CODEC.encode_answer([{"role": "user", "content": "Higher."}], after=CODEC.end_of_reply)
    later = np.concatenate([prompt, CODEC.encode_reply("first"), observed])
    assert ask.reply(request(later)) == "second \nin two lines"
    assert capsys.readouterr().out == "  observed  | Higher.\n"
    assert ask.reply(request(later)) is None, "the input has ended"
