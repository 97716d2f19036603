from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo_hub.run.base_model import PromptCodec
from echo_hub.run.chat_template import ChatTemplate, Message
from echo_shared.errors import ConfigError

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {%- if loop.last %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.first %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{%- endif %}
{%- endfor %}"""
CALLS = """{%- set called = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|start|>user: ' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set called.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to ' + called.name + ': ' + message.tool_calls[0].function.arguments | tojson }}
        {{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}{{- '<|start|>assistant: ' + message.content + '<|end|>' }}
    {%- elif called.name is none %}{{- raise_exception('There was no tool call!') }}
    {%- else %}{{- '<|start|>' + called.name + ': ' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if tools %}{{- 'with tools' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
LINE_END = """{%- for message in messages %}{{- '<|start|>' + message.role + '\n' + message.content + '\n<|end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"""
SPECIAL = {
    CALLS: ("<|start|>", "<|end|>", "<|call|>"),
    LINE_END: ("<|start|>", "<|end|>"),
    QWEN3: ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    LLAMA3: ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    MISTRAL: ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
}
NAMES = pytest.mark.parametrize("source", [QWEN3, LLAMA3, MISTRAL], ids=["qwen3", "llama3", "mistral"])
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}
RESULT = {"role": "tool", "content": "408", "name": "calculate", "tool_call_id": "call00000"}
USER = {"role": "user", "content": "Go on, (echo:reply 0)!"}


def tokenizer_of(source: str) -> Tokenizer:
    """Return a tokenizer of bytes with the template's special tokens. Its only merge joins two line breaks, such as a
    reply's last one and the template's next one.
    """
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "ĊĊ": len(vocabulary)}, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL[source]))
    return tokenizer


def codec_of(source: str, *, strip_thinking: bool = False, **options: Any) -> PromptCodec:
    tokenizer, (bos, eos, *_) = tokenizer_of(source), SPECIAL[source]
    chat = ChatTemplate(source=source, special_tokens={"bos_token": bos, "eos_token": eos}, options=options)
    stop = tokenizer.token_to_id(eos)
    return PromptCodec(tokenizer, stop_ids=(stop,), chat=chat, strip_thinking=strip_thinking)


def chat_of(codec: PromptCodec) -> ChatTemplate:
    assert codec._chat is not None
    return codec._chat


@NAMES
@pytest.mark.parametrize(
    "answers", [[USER], [RESULT], [RESULT, {**RESULT, "content": "7", "tool_call_id": "call00001"}]]
)
@pytest.mark.parametrize("reply", ["42", "Let me see:\n\n<tool_call>{}</tool_call>"])
def test_ids_between_two_replies_equal_the_templates(source: str, answers: list[Message], reply: str) -> None:
    """Prompt, reply and answer are encoded one by one. Together they must have the ids of the whole conversation."""
    codec = codec_of(source).with_tools([TOOL])
    tokenizer = tokenizer_of(source)
    whole = chat_of(codec).render(
        [{"role": "user", "content": "12 * 34?"}, {"role": "assistant", "content": "REPLY"}, *answers]
    )
    before, _, after = whole.partition("REPLY")
    prompt = codec.encode_prompt("12 * 34?").tolist()
    drawn = tokenizer.encode(reply, add_special_tokens=False).ids
    expected = tokenizer.encode(before + reply + after, add_special_tokens=False).ids
    for ended in ([*drawn, *codec.stop_ids], drawn):  # The reply ends with its stop token, or was truncated.
        between = codec.encode_answer(answers, after=ended[-1]).tolist()
        # Mistral's template begins a reply with a blank, which the model samples.
        lead = tokenizer.encode(" ", add_special_tokens=False).ids if source == MISTRAL else []
        assert [*prompt, *lead, *ended, *between] == expected


@NAMES
def test_tools_are_in_every_prompt(source: str) -> None:
    plain = codec_of(source)
    codec = plain.with_tools([TOOL])
    assert '"calculate"' in codec.render_prompt("hm") and '"calculate"' not in plain.render_prompt("hm")
    assert plain.with_tools([]) is plain
    behind = codec.text(codec.encode_answer([RESULT], after=-1))
    assert "408" in behind and '"parameters"' not in behind


def test_a_template_without_tools_takes_none() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat = ChatTemplate(source=plain, special_tokens={})
    codec = PromptCodec(tokenizer_of(QWEN3), stop_ids=(1,), chat=chat)
    with pytest.raises(ConfigError, match="does not show"):
        codec.with_tools([TOOL])
    with pytest.raises(ConfigError, match="no chat template"):
        PromptCodec(tokenizer_of(QWEN3), stop_ids=(1,), chat=None).with_tools([TOOL])


def test_a_templates_own_error_text_is_shown() -> None:
    codec = codec_of(MISTRAL).with_tools([TOOL])
    with pytest.raises(ConfigError, match=r"(?s)turns of user, assistant, tool: .*length 9"):
        codec.encode_answer([{**RESULT, "tool_call_id": "1"}], after=-1)


def test_template_options_are_passed_to_the_template() -> None:
    codec = codec_of(QWEN3, enable_thinking=False)
    codec.check()
    assert codec.render_prompt("hm").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert codec.text(codec.encode_answer([USER], after=-1)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert codec_of(QWEN3, enable_thinking=True).render_prompt("hm").endswith("<|im_start|>assistant\n")


def test_an_option_that_the_template_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no such option.*enable_thinkin$|enable_thinkin\n"):
        codec_of(QWEN3, enable_thinkin=False).check()


@pytest.mark.parametrize(
    ("reply", "scored"),
    [("<think>7?</think>\n\n42", "\n\n42"), ("42", "42"), ("<think>42", ""), ("7</think>42", "42")],
)
def test_thoughts_are_not_scored(reply: str, scored: str) -> None:
    codec = codec_of(QWEN3, strip_thinking=True)
    drawn = [*tokenizer_of(QWEN3).encode(reply, add_special_tokens=False).ids, *codec.stop_ids]
    assert codec.reply(drawn) == scored
    assert codec_of(QWEN3).reply(drawn) == reply


def test_a_thought_opened_by_the_template_is_not_scored() -> None:
    opened = "{% if add_generation_prompt %}A:<think>\n{% endif %}"
    source = "{% for message in messages %}{{ message.content }}{% endfor %}" + opened
    chat = ChatTemplate(source=source, special_tokens={})
    codec = PromptCodec(tokenizer_of(QWEN3), stop_ids=(1,), chat=chat, strip_thinking=True)
    replies = [tokenizer_of(QWEN3).encode(text).ids for text in ("7?</think>42", "42")]
    assert [codec.reply(ids) for ids in replies] == ["42", ""]


def test_thoughts_in_special_tokens_are_seen_and_other_special_tokens_are_not_scored() -> None:
    tokenizer = tokenizer_of(QWEN3)
    tokenizer.add_special_tokens(["<think>", "</think>"])
    codec = PromptCodec(tokenizer, stop_ids=(tokenizer.token_to_id("<|im_end|>"),), chat=None, strip_thinking=True)
    drawn = tokenizer.encode("<think>7</think>42<|im_end|>", add_special_tokens=False).ids
    assert codec.reply(drawn) == "42" and codec.decode(drawn) == "742"


def test_an_answer_comes_as_after_a_tool_call_if_the_template_needs_one() -> None:
    """In templates such as gpt-oss's, a tool call ends with another token than a reply, and the tool's answer begins
    with the tool's name. So the answer must be rendered after a call."""
    tokenizer = tokenizer_of(CALLS)
    stops = tuple(map(tokenizer.token_to_id, ("<|end|>", "<|call|>")))
    chat = ChatTemplate(source=CALLS, special_tokens={})
    codec = PromptCodec(tokenizer, stop_ids=stops, chat=chat).with_tools([TOOL])
    for after, begins in ((stops[1], ""), (stops[0], "<|call|>"), (-1, "<|call|>")):
        between = codec.text(codec.encode_answer([RESULT], after=after))
        assert between == f"{begins}<|start|>calculate: 408<|end|>with tools<|start|>assistant"
    assert codec.text(codec.encode_answer([USER], after=stops[0])).startswith("<|start|>user: Go on")


def test_a_template_whose_calls_do_not_end_is_refused() -> None:
    tokenizer = tokenizer_of(CALLS)
    codec = PromptCodec(
        tokenizer, stop_ids=(tokenizer.token_to_id("<|start|>"),), chat=ChatTemplate(source=CALLS, special_tokens={})
    )
    codec = codec.with_tools([TOOL])  # The answer itself begins with the stop token.
    assert codec.text(codec.encode_answer([RESULT], after=-1)).startswith("<|start|>calculate: 408")
    with pytest.raises(ConfigError, match="There was no tool call"):
        PromptCodec(tokenizer, stop_ids=(0,), chat=ChatTemplate(source=CALLS, special_tokens={})).with_tools([TOOL])


def test_a_template_that_omits_a_tools_answer_is_refused() -> None:
    source = (
        "{% for message in messages if message.role != 'tool' %}{{ message.content }}<|end|>{% endfor %}{{ tools }}"
    )
    chat = ChatTemplate(source=source, special_tokens={})
    tokenizer = tokenizer_of(LINE_END)
    codec = PromptCodec(tokenizer, stop_ids=(tokenizer.token_to_id("<|end|>"),), chat=chat)
    with pytest.raises(ConfigError, match=r"omits a tool's answer"):
        codec.with_tools([TOOL])


def test_a_reply_that_ends_with_a_line_break_and_a_stop_token_is_not_ended_twice() -> None:
    codec = codec_of(LINE_END)
    (stop,) = codec.stop_ids
    behind = "<|start|>user\nGo on, (echo:reply 0)!\n<|end|>\n<|start|>assistant\n"
    assert codec.text(codec.encode_answer([USER], after=stop)) == f"\n{behind}"
    assert codec.text(codec.encode_answer([USER], after=-1)) == f"\n<|end|>\n{behind}"
    assert codec.text(codec.encode_reply("42")) == "42\n<|end|>"
