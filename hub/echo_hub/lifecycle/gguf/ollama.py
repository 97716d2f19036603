"""A Modelfile, with which Ollama talks with an exported GGUF file (https://docs.ollama.com/modelfile).

Ollama does not run the chat template in the file. For a few well-known chat templates, Ollama has a translation to Go's
template language; any other model needs TEMPLATE. `chat_parts` renders a short conversation with the base's
own template, cuts it at the messages, and puts it together again:

    <|im_start|>system\\n SYSTEM <|im_end|>\\n | <|im_start|>user\\n USER <|im_end|>\\n | <|im_start|>assistant\\n

TEMPLATE is written only if other conversations, joined from the same parts, equal the text that the base's template
renders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import ConfigError

_SYSTEM: Final = {"role": "system", "content": "(echo:system)"}
_ASKED: Final = {"role": "user", "content": "(echo:first)"}
_REPLIED: Final = {"role": "assistant", "content": "(echo:reply)"}
_ASKED_AGAIN: Final = {"role": "user", "content": "(echo:second)"}
_QUOTES: Final = '"""'
_DEFAULT_CONTEXT: Final = 4_096
"""Number of tokens of a conversation that Ollama keeps if the Modelfile does not set it."""

_Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParts:
    """The text that the chat template writes before and after each kind of message, and before the model's next
    reply."""

    around: Mapping[str, tuple[str, str]]
    """Text before and after a message, by the message's role. If there is no role `system`, the model has no system
    messages.
    """
    reply: str
    default_system: str = ""
    """System message that the template adds by itself; "" if it adds none."""
    always_system: bool = False
    """True if every conversation begins with a system message, even with an empty one."""

    def joined(self, messages: _Messages) -> str:
        """Return the conversation as text, up to the next reply."""
        if (self.default_system or self.always_system) and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        texts = [f"{self.around[one['role']][0]}{one['content']}{self.around[one['role']][1]}" for one in messages]
        return "".join(texts) + self.reply

    def template(self) -> str:
        """Return the value of TEMPLATE, in Go's template language."""
        around = dict(self.around)
        begin = ""
        if self.always_system:
            before, after = around.pop("system")
            begin = f"{before}{{{{ .System }}}}{after}"
        cases = [
            f'{{{{ {"else if" if number else "if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for number, (role, (before, after)) in enumerate(around.items())
        ]
        return f"{begin}{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{ end }}}}{self.reply}"


def chat_parts(codec: PromptCodec) -> ChatParts | None:
    """Return the parts of the model's chat template. Return None if the model has no chat template, or if its text
    cannot be joined from such parts."""
    if not codec.is_chat:
        return None
    plain = codec.with_words(system_prompt="", prompt_suffix="")
    try:
        parts = _cut(plain)
        conversations = [[_ASKED], [_ASKED, _REPLIED, _ASKED_AGAIN]]
        if "system" in parts.around:
            conversations += [[_SYSTEM, *messages] for messages in conversations]
        same = all(parts.joined(messages) == _rendered(plain, messages) for messages in conversations)
    except (ConfigError, _NoPartsError):
        return None
    literals = (*(text for pair in parts.around.values() for text in pair), parts.reply, parts.default_system)
    return parts if same and not any("{{" in text or _QUOTES in text for text in literals) else None


class _NoPartsError(ValueError):
    """The template changes the text of a message, so a rendered conversation cannot be cut at its messages."""


def _cut(codec: PromptCodec) -> ChatParts:
    before_first, after_first = _between(_rendered(codec, [_ASKED]), [_ASKED])
    _, between, again, _ = _between(
        _rendered(codec, [_ASKED, _REPLIED, _ASKED_AGAIN]), [_ASKED, _REPLIED, _ASKED_AGAIN]
    )
    # Without the header of the next reply, a conversation ends with the end of its last message.
    after_user = _between(_rendered(codec, [_ASKED], is_for_reply=False), [_ASKED])[-1]
    after_reply = _between(_rendered(codec, [_ASKED, _REPLIED], is_for_reply=False), [_ASKED, _REPLIED])[-1]
    if not again.startswith(after_reply):
        # Some templates also write the tokenizer's end of text after the last message.
        end = codec.text([codec.end_of_text])
        after_user, after_reply = after_user.removesuffix(end), after_reply.removesuffix(end)
    before_user = again.removeprefix(after_reply)
    around = {
        "user": (before_user, after_user),
        "assistant": (between.removeprefix(after_user), after_reply),
    }
    reply = after_first.removeprefix(after_user)
    begin = before_first.removesuffix(before_user)
    try:
        before_system, system_to_user, _ = _between(_rendered(codec, [_SYSTEM, _ASKED]), [_SYSTEM, _ASKED])
    except ConfigError:
        return ChatParts(around=around, reply=reply)
    after_system = system_to_user.removesuffix(before_user)
    return ChatParts(
        around={"system": (before_system, after_system), **around},
        reply=reply,
        default_system=begin.removeprefix(before_system).removesuffix(after_system),
        always_system=bool(begin) and begin == before_system + after_system,
    )


def _rendered(codec: PromptCodec, messages: _Messages, *, is_for_reply: bool = True) -> str:
    """Return the text without a begin token: llama.cpp adds it."""
    text = codec.render_opening(messages, is_for_reply=is_for_reply)
    return text.removeprefix(codec.text([codec.bos_id])) if codec.begins_with_bos and codec.bos_id is not None else text


def _between(text: str, messages: _Messages) -> list[str]:
    """Return the parts of `text` before the first message, between the messages, and after the last one."""
    parts = []
    for message in messages:
        part, found, text = text.partition(message["content"])
        if not found:
            raise _NoPartsError
        parts.append(part)
    return [*parts, text]


def modelfile(codec: PromptCodec, *, file: str, system_prompt: str, prompt_suffix: str, temperature: float) -> str:
    """Return the Modelfile of an exported file. With it, Ollama samples as the training did: from all tokens (no top-k
    or top-p), at the temperature of the training."""
    parts = chat_parts(codec)
    lines = [f"FROM ./{file}", ""]
    if parts is not None:
        lines += [f"TEMPLATE {_QUOTES}{parts.template()}{_QUOTES}", ""]
        system = system_prompt or parts.default_system
        if system and _QUOTES not in system:
            lines += [f"SYSTEM {_QUOTES}{system}{_QUOTES}", ""]
    elif codec.is_chat:
        lines += [
            "# The chat template of this model cannot be written for Ollama. Ollama may know it by itself:",
            "# `ollama show --modelfile NAME` prints the template that it uses.",
            "",
        ]
    else:
        lines += [f"TEMPLATE {_QUOTES}{{{{ .Prompt }}}}{_QUOTES}", ""]
    if prompt_suffix:
        lines += [f"# The model was trained on prompts that end with {prompt_suffix!r}.", ""]
    for token_id in codec.stop_ids:
        text = codec.text([token_id])
        if text and '"' not in text and "\n" not in text:
            lines.append(f'PARAMETER stop "{text}"')
    lines += [f"PARAMETER temperature {temperature:g}", "PARAMETER top_k 0", "PARAMETER top_p 1"]
    lines.append("PARAMETER repeat_penalty 1")
    if codec.context_tokens < _DEFAULT_CONTEXT:
        lines.append(f"PARAMETER num_ctx {codec.context_tokens}")
    return "\n".join(lines) + "\n"
