"""A demonstration must have exactly the ids that the hub would send and a node would sample for this conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.chat_template import ChatTemplate
from echo_hub.run.demonstrations import Demonstrations, read_demonstrations
from echo_shared.errors import ConfigError
from tests.echo_hub.run.test_chat_template import LLAMA3, MISTRAL, NAMES, QWEN3, SPECIAL, codec_of, tokenizer_of

TINY = PromptCodec.load(resolve_base("builtin:tiny"))
USER = {"role": "user", "content": "12 * 34?"}
REPLY = {"role": "assistant", "content": "408"}


def read(tmp_path: Path, *lines: Any, codec: PromptCodec = TINY, max_tokens: int = 64) -> Demonstrations:
    path = tmp_path / "demonstrations.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return read_demonstrations(path, {"": codec}, max_tokens=max_tokens)


def refusal(tmp_path: Path, *lines: Any, codec: PromptCodec = TINY) -> str:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, *lines, codec=codec)
    return str(error.value)


def test_prompt_and_completion_have_the_hubs_and_nodes_ids(tmp_path: Path) -> None:
    codec = TINY.with_words(system_prompt="", prompt_suffix="=")
    both = {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}
    as_lists = {"prompt": both["messages"][:1], "completion": both["messages"][1:]}
    found = read(tmp_path, {"prompt": "2+2", "completion": "4"}, both, "", as_lists, codec=codec)
    assert len(found.examples) == 3
    for one in found.examples:
        assert one.prompt_ids.tolist() == codec.encode_prompt("2+2").tolist()
        assert codec.text(one.prompt_ids) == "2+2="
        assert codec.text(one.completion_ids) == "4<eos>" and one.loss_mask.all()


@NAMES
def test_a_conversation_is_an_episode(tmp_path: Path, source: str) -> None:
    """The learner trains only on the replies with their stop tokens. All ids equal those of the chat template."""
    codec = codec_of(source)
    messages = [USER, REPLY, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    (one,) = read(tmp_path, {"messages": messages}, codec=codec).examples
    stop = SPECIAL[source][1]
    assert codec.text(one.completion_ids[one.loss_mask]) == f"408{stop}Yes.{stop}"
    assert one.prompt_ids.tolist() == codec.encode_prompt("12 * 34?").tolist()
    between = codec.encode_answer([{"role": "user", "content": "Sure?"}], after=int(codec.stop_ids[0])).tolist()
    assert one.completion_ids[~one.loss_mask].tolist() == between
    assert one.loss_mask[-1]


def test_a_lines_own_system_turn_replaces_the_runs(tmp_path: Path) -> None:
    codec = codec_of(QWEN3).with_words(system_prompt="Be brief.", prompt_suffix=" Think.")
    own = {"messages": [{"role": "system", "content": "Be kind."}, USER, REPLY]}
    plain, kind = read(tmp_path, {"messages": [USER, REPLY]}, own, codec=codec).examples
    assert plain.prompt_ids.tolist() == codec.encode_prompt("12 * 34?").tolist()
    said = codec.text(kind.prompt_ids)
    assert "Be kind." in said and "Be brief." not in said and "12 * 34? Think.<|im_end|>" in said


def test_an_answer_of_a_tool_is_context(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "408", "name": "calculate", "tool_call_id": "call00000"}
    (one,) = read(tmp_path, {"messages": [USER, REPLY, tool, REPLY]}, codec=codec_of(QWEN3)).examples
    said = codec_of(QWEN3).text(one.completion_ids[~one.loss_mask])
    assert "<tool_response>\n408" in said


def test_a_thought_that_the_template_opens_is_not_opened_twice(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:<think>\n{% endif %}"
    chat = ChatTemplate(source=source, special_tokens={})
    codec = PromptCodec(tokenizer_of(QWEN3), stop_ids=(1,), chat=chat)
    line = {"prompt": "7?", "completion": "<think>\nSeven.</think>7"}
    (one,) = read(tmp_path, line, codec=codec).examples
    assert codec.text(one.prompt_ids).endswith("A:<think>\n")
    assert codec.text(one.completion_ids[:-1]) == "Seven.</think>7" and one.completion_ids[-1] == 1


@pytest.mark.parametrize(
    ("source", "stop_ids", "expected"), [(LLAMA3, "<|eot_id|>", 1), (QWEN3, "<|im_end|>", 1), (MISTRAL, "</s>", 1)]
)
def test_of_several_stop_tokens_the_templates_is_used(source: str, stop_ids: str, expected: int) -> None:
    tokenizer = tokenizer_of(source)
    first, stop = (tokenizer.token_to_id(name) for name in (SPECIAL[source][0], stop_ids))
    chat = ChatTemplate(source=source, special_tokens={"bos_token": SPECIAL[source][0], "eos_token": stop_ids})
    both = PromptCodec(tokenizer, stop_ids=(first, stop), chat=chat, eos_id=first)
    assert both.encode_reply("42")[-expected] == stop
    plain = PromptCodec(tokenizer, stop_ids=(first, stop), chat=None, eos_id=stop)
    assert plain.encode_reply("42")[-1] == stop, "without a template, the tokenizer's own"
    assert PromptCodec(tokenizer, stop_ids=(first, stop), chat=None).encode_reply("42")[-1] == first


def test_a_stop_token_that_is_written_out_is_not_added_again(tmp_path: Path) -> None:
    once, twice = read(
        tmp_path,
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": "2<eos>"},
    ).examples
    assert np.array_equal(once.completion_ids, twice.completion_ids)


def test_completions_that_no_node_could_sample_are_left_out(tmp_path: Path) -> None:
    lines = [{"prompt": "1+1=", "completion": "2" * length} for length in (3, 4, 5)]
    lines += [{"prompt": "1" * 253, "completion": "2"}, {"prompt": "1" * 255, "completion": "2"}]
    found = read(tmp_path, *lines, max_tokens=5)
    assert len(found.examples) == 3, "the stop token counts"
    assert (found.long_replies, found.long_conversations) == ((3,), (5,))
    with pytest.raises(ConfigError, match=r"(?s)no demonstration.*1 with a reply above sampling\.max_tokens = 5"):
        read(tmp_path, lines[2], max_tokens=5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": ', "not JSON"),
        ('{"prompt": "2+2=", "completion": "4", "completion": "5"}', "the key 'completion' more than once"),
        ('{"prompt": "2+2= \\ud83d", "completion": "4"}', "one half of a character"),
        ('{"prompt": "2+2=", "completion": "4 \\udc00"}', "one half of a character"),
        ('{"prompt": "2+2=", "completion": "4", "weight": NaN}', "NaN, which is not a JSON number"),
        ('{"prompt": "2+2=", "completion": "4", "weight": 1e999}', "too large"),
        ('{"prompt": "2+2=", "completion": "4", "more": ' + "[" * 100_000, "nests lists and maps"),
        ("[1]", "not a JSON object"),
        ({"prompt": "1+1="}, "content of the assistant message is empty"),
        ({"prompt": 3, "completion": "3"}, "content of the user message is empty"),
        ({"prompt": " ", "completion": "3"}, "content of the user message is empty"),
        ({"prompt": "1", "messages": [USER, REPLY]}, "use one form"),
        ({"messages": "1"}, "not a list"),
        ({"messages": []}, "begin with a user message"),
        ({"messages": [USER]}, "end with an assistant message"),
        ({"messages": [REPLY]}, "begin with a user message"),
        ({"messages": [USER, REPLY, REPLY]}, "two assistant messages"),
        ({"messages": [USER, {"role": "system", "content": "x"}, REPLY]}, "not the first message"),
        ({"messages": [{"role": "human", "content": "x"}, REPLY]}, "'human', none of system"),
        ({"messages": [USER, {**REPLY, "tool_calls": [1]}]}, "tool_calls"),
        ({"prompt": "1+1=", "completion": "2<eos>3"}, "stop token before its end"),
        ({"prompt": "1+1=", "completion": "2", "task": "sums"}, "name its task"),
    ],
)
def test_bad_lines_are_refused_by_their_numbers(tmp_path: Path, line: Any, said: str) -> None:
    text = refusal(tmp_path, {"prompt": "1+1=", "completion": "2"}, "", line)
    assert "1 of the lines" in text and "nothing was trained" in text
    assert "line 3: " in text and said in text


def test_all_bad_lines_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    text = refusal(tmp_path, *["?"] * 9)
    assert "9 of the lines" in text and "line 5: " in text and "line 6: " not in text and "and 4 more" in text


def test_with_several_tasks_a_line_names_its_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    line = {"prompt": "1+1", "completion": "2"}
    codecs = {name: TINY.with_words(system_prompt="", prompt_suffix=suffix) for name, suffix in (("a", "="), ("b", ""))}
    path.write_text(json.dumps({**line, "task": "a"}) + "\n" + json.dumps({**line, "task": "b"}))
    found = read_demonstrations(path, codecs, max_tokens=9)
    assert [TINY.text(one.prompt_ids) for one in found.examples] == ["1+1=", "1+1"]
    path.write_text(json.dumps(line))
    with pytest.raises(ConfigError, match="None is none of a, b"):
        read_demonstrations(path, codecs, max_tokens=9)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_demonstrations(tmp_path / "nowhere", {"": TINY}, max_tokens=9)
