"""The chat templates of published models, which come with llama.cpp's source. Echo must render them as transformers
does.

`make templates` fetches them; they are not part of this repository. `real_templates` has the facts about each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from echo_hub.run.base_model import PromptCodec
from echo_hub.run.chat_template import DATE, ChatTemplate, Message
from echo_hub.run.thinking import ends_in_thought
from echo_shared.errors import ConfigError
from tests.echo_hub.run.real_templates import FACTS, Facts

_FOLDER: Final = Path(os.environ.get("ECHO_TEST_TEMPLATES") or Path(__file__).parents[3] / "build" / "templates")
pytestmark = pytest.mark.skipif(not _FOLDER.is_dir(), reason="llama.cpp's chat templates are not here: make templates")
EVERY = pytest.mark.parametrize("name", FACTS)
USER: Final = {"role": "user", "content": "What is 12 * 34?"}
REPLY: Final = {"role": "assistant", "content": "It is 408."}
THANKS: Final = {"role": "user", "content": "And 12 * 35?"}
SYSTEM: Final = {"role": "system", "content": "Answer briefly."}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "Arithmetic."}},
            "required": ["value"],
        },
    },
}
CALL: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "calculate", "arguments": {"value": "12 * 34"}},
        }
    ],
}
RESULT: Final = {"role": "tool", "content": "000408", "name": "calculate", "tool_call_id": "call00000"}


class _Date(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return DATE


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers use the date that Echo passes to templates, instead of today's date."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Date)


def source_of(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def expected(name: str, messages: Sequence[Message], *, tools: Sequence[Any] = (), **options: Any) -> str:
    """Return the text that transformers renders."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    rendered: str = tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        chat_template=source_of(name),
        tokenize=False,
        add_generation_prompt=True,
        date_string=f"{DATE:%d %b %Y}",
        **options,
    )
    return rendered


def chat_of(name: str, **options: Any) -> ChatTemplate:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source=source_of(name), special_tokens=special, options=options)


def codec_of(name: str, **options: Any) -> PromptCodec:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys(["<s>", "</s>", *FACTS[name].stops])))
    stops = tuple(map(tokenizer.token_to_id, FACTS[name].stops))
    return PromptCodec(tokenizer, stop_ids=stops, eos_id=stops[0], chat=chat_of(name, **options))


def tools_of(facts: Facts) -> Sequence[Any]:
    return [TOOL] if facts.alone else []


def test_every_template_is_in_the_table() -> None:
    assert {file.stem for file in _FOLDER.glob("*.jinja")} == set(FACTS)


@EVERY
def test_prompts_are_those_of_transformers(name: str) -> None:
    facts = FACTS[name]
    for messages, problem in (
        ([USER], facts.alone),
        ([SYSTEM, USER], facts.alone or facts.system),
        ([USER, REPLY, THANKS], facts.alone),
    ):
        if problem:
            with pytest.raises(ConfigError, match="cannot be rendered") as caught:
                chat_of(name).render(messages)
            assert problem in str(caught.value)
        else:
            assert chat_of(name).render(messages) == expected(name, messages)


@EVERY
def test_thinking_is_turned_on_and_off(name: str) -> None:
    facts, tools = FACTS[name], tools_of(FACTS[name])
    if "functions" in facts.alone:
        pytest.skip("This template needs a variable of its own.")
    plain = chat_of(name).with_tools(tools).render([USER])
    assert plain.endswith(facts.header) and plain == expected(name, [USER], tools=tools)
    if facts.thinking is None:
        return
    option, *values = facts.thinking
    prompts = []
    for value, header in zip(values, (facts.on, facts.off), strict=True):
        chat = chat_of(name, **{option: value})
        chat.check()
        prompts.append(chat.render([USER]))
        assert prompts[-1] == expected(name, [USER], **{option: value})
        assert prompts[-1].endswith(header or facts.header)
        begun = codec_of(name, **{option: value})._begins_in_thought
        assert begun == ends_in_thought(header or facts.header)
    assert prompts[0] != prompts[1]


@EVERY
def test_tools_are_shown_or_refused(name: str) -> None:
    facts = FACTS[name]
    codec = codec_of(name)
    if facts.tools or "functions" in facts.alone:
        with pytest.raises(ConfigError, match=facts.tools or "does not show tools"):
            codec.with_tools([TOOL])
        return
    codec = codec.with_tools([TOOL])
    prompt = codec.render_prompt(USER["content"])
    assert prompt == expected(name, [USER], tools=[TOOL]) and "calculate" in prompt
    try:
        whole = expected(name, [USER, CALL, RESULT], tools=[TOOL])
    except (TemplateError, TypeError):  # The template does not take this call: its answer comes after a text.
        whole = expected(name, [USER, REPLY, RESULT], tools=[TOOL])
    for after in codec.stop_ids:
        between = codec.text(codec.encode_answer([RESULT], after=after))
        assert "408" in between and whole.endswith(between)


@EVERY
def test_ids_behind_a_reply_are_the_templates(name: str) -> None:
    """A complete or truncated reply gets the end that the template writes. Only the text after the reply is encoded."""
    facts = FACTS[name]
    if "functions" in facts.alone:
        pytest.skip("This template needs a variable of its own.")
    codec = codec_of(name).with_tools(tools_of(facts))
    whole = expected(name, [USER, REPLY, THANKS], tools=tools_of(facts))
    behind = whole.rpartition(REPLY["content"])[2]
    ends = facts.stops[0] if facts.ends is None else facts.ends
    reply = codec.text(codec.encode_reply(REPLY["content"]))
    assert reply == REPLY["content"] + (ends or facts.stops[0])
    (stop,) = (
        stop for stop in codec.stop_ids if codec.text([stop]) == (ends or facts.stops[0])[-len(codec.text([stop])) :]
    )
    drawn = codec.text(codec.encode_answer([THANKS], after=stop))
    assert behind == (ends + drawn if ends else drawn)
    # A truncated reply also gets the end that the template writes.
    assert codec.text(codec.encode_answer([THANKS], after=-1)) == behind
