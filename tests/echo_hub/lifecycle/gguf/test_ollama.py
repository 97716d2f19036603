"""Templates for Ollama must produce the same text as the model's own template. Ollama itself is not run here."""

from __future__ import annotations

from typing import Any, Final

import pytest

from echo_hub.lifecycle.gguf.ollama import chat_parts, modelfile
from echo_hub.run.base_model import PromptCodec
from tests.echo_hub.lifecycle.gguf.conftest import CHATML, byte_tokenizer

DEFAULT_SYSTEM: Final = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a fox.<|im_end|>\n{% endif %}" + CHATML
)
GEMMA: Final = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA: Final = (
    "{{ bos_token }}<|head|>system<|/head|>\n\nToday: {{ date_string }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}<|eot|>"
    "{% for message in messages %}<|head|>{{ message.role }}<|/head|>\n\n{{ message.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
THINKING: Final = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
NO_PARTS: Final = "{% for message in messages %}{{ message.content | upper }}{% endfor %}Answer:"


@pytest.fixture
def codec_with(write_tokenizer: Any) -> Any:
    def codec(template: str) -> PromptCodec:
        tokenizer = byte_tokenizer("gpt-2")
        tokenizer.add_special_tokens(["<s>"])
        return PromptCodec.load(write_tokenizer(tokenizer, end="<|im_end|>", template=template, bos_token="<s>"))

    return codec


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
            '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
            '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
            "{{ end }}{{ end }}<|im_start|>assistant\n",
        ),
        (
            GEMMA,
            '{{ range .Messages }}{{ if eq .Role "user" }}<start_of_turn>user\n{{ .Content }}<end_of_turn>\n'
            '{{ else if eq .Role "assistant" }}<start_of_turn>model\n{{ .Content }}<end_of_turn>\n'
            "{{ end }}{{ end }}<start_of_turn>model\n",
        ),
        (
            LLAMA,
            "<|head|>system<|/head|>\n\nToday: 26 Jul 2024\n\n{{ .System }}<|eot|>"
            '{{ range .Messages }}{{ if eq .Role "user" }}<|head|>user<|/head|>\n\n{{ .Content }}<|eot|>'
            '{{ else if eq .Role "assistant" }}<|head|>assistant<|/head|>\n\n{{ .Content }}<|eot|>'
            "{{ end }}{{ end }}<|head|>assistant<|/head|>\n\n",
        ),
    ],
)
def test_a_template_is_cut_into_its_parts(codec_with: Any, template: str, expected: str) -> None:
    parts = chat_parts(codec_with(template))
    assert parts is not None and parts.template() == expected


def test_a_template_that_opens_the_thought_opens_it_for_ollama_too(codec_with: Any) -> None:
    parts = chat_parts(codec_with(THINKING))
    assert parts is not None and parts.template().endswith("{{ end }}{{ end }}<|im_start|>assistant\n<think>\n")


def test_a_system_message_of_the_template_s_own_is_found(codec_with: Any) -> None:
    codec = codec_with(DEFAULT_SYSTEM)
    parts = chat_parts(codec)
    assert parts is not None and parts.default_system == "You are a fox."
    text = modelfile(codec, file="a.gguf", system_prompt="", prompt_suffix="", temperature=1.0)
    assert 'SYSTEM """You are a fox."""' in text
    own = modelfile(codec, file="a.gguf", system_prompt="Be brief.", prompt_suffix="", temperature=1.0)
    assert 'SYSTEM """Be brief."""' in own and "fox" not in own


@pytest.mark.parametrize(
    "template", [NO_PARTS, CHATML.replace("<|im_start|>", "{{ '{{' }}"), "{{ messages[0].content }}"]
)
def test_a_template_of_another_make_is_left_to_ollama(codec_with: Any, template: str) -> None:
    codec = codec_with(template)
    assert chat_parts(codec) is None
    text = modelfile(codec, file="a.gguf", system_prompt="", prompt_suffix="", temperature=1.0)
    assert "TEMPLATE" not in text.replace("template", "") and "cannot be written for Ollama" in text


def test_the_modelfile_samples_as_the_training_did(codec_with: Any, write_tokenizer: Any) -> None:
    text = modelfile(
        codec_with(CHATML), file="sums-v3-q8_0.gguf", system_prompt="", prompt_suffix="\nAnswer:", temperature=0.7
    )
    lines = text.splitlines()
    assert (
        lines[0] == "FROM ./sums-v3-q8_0.gguf"
        and "# The model was trained on prompts that end with '\\nAnswer:'." in lines
    )
    assert {'PARAMETER stop "<|im_end|>"', "PARAMETER temperature 0.7", "PARAMETER top_k 0", "PARAMETER top_p 1"} < set(
        lines
    )
    assert "PARAMETER num_ctx 512" in lines, "the model's context is smaller than Ollama's"


def test_a_model_without_a_template_gets_the_bare_prompt(write_tokenizer: Any) -> None:
    codec = PromptCodec.load(write_tokenizer(byte_tokenizer("gpt-2"), end="<|im_end|>"))
    text = modelfile(codec, file="a.gguf", system_prompt="", prompt_suffix="", temperature=1.0)
    assert 'TEMPLATE """{{ .Prompt }}"""' in text
