"""Refuse options that other OpenAI-compatible servers offer, that this hub does not offer, and that would change
samples.

The hub accepts only their neutral values, for example `top_p` 1. Options without effect on samples are ignored, as by
OpenAI's servers: `user`, `metadata`, `store`, `priority`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from echo_hub.openai.error_answers import UnsupportedOption

_NO_SHAPING: Final = (
    "The hub can check samples only if they are drawn from the whole distribution: leave the option out."
)
_NO_FORMS: Final = "Ask for the format in the prompt, and check the answer."
_TEXT_ONLY: Final = "This model reads and writes text only."

_NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "frequency_penalty": ((0,), _NO_SHAPING),
    "presence_penalty": ((0,), _NO_SHAPING),
    "repetition_penalty": ((1,), _NO_SHAPING),
    "length_penalty": ((1,), _NO_SHAPING),
    "top_p": ((1,), _NO_SHAPING),
    "top_k": ((0, -1), _NO_SHAPING),
    "min_p": ((0,), _NO_SHAPING),
    "top_a": ((0,), _NO_SHAPING),
    "typical_p": ((1,), _NO_SHAPING),
    "tfs_z": ((1,), _NO_SHAPING),
    "logit_bias": (({},), _NO_SHAPING),
    "bad_words": (([],), _NO_SHAPING),
    "bad_words_token_ids": (([],), _NO_SHAPING),
    "allowed_token_ids": ((), _NO_SHAPING),
    "logits_processors": (([],), _NO_SHAPING),
    "min_tokens": ((0,), _NO_SHAPING),
    "best_of": ((1,), "Ask for n completions and choose one."),
    "use_beam_search": ((False,), _NO_SHAPING),
    "early_stopping": ((False,), _NO_SHAPING),
    "thinking_token_budget": ((), "Limit the whole completion: max_tokens."),
    "structured_outputs": ((), _NO_FORMS),
    "grammar": (("",), _NO_FORMS),
    "json_schema": ((), _NO_FORMS),
    "regex": (("",), _NO_FORMS),
    "functions": (([],), "Use tools instead."),
    "function_call": (("none", "auto"), "Use tools and tool_choice instead."),
    "parallel_tool_calls": ((True,), "The model decides how many tools it calls."),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "features": ((), _TEXT_ONLY),
    "web_search_options": ((), "Offer a search as one of your tools."),
    "reasoning_effort": ((), "If the chat template has such an option, send it in chat_template_kwargs."),
    "verbosity": ((), "Ask for it in the prompt."),
    "documents": (([],), "Put them into the messages."),
    "chat_template": ((), "The model's own template is used. Render the prompt yourself, and send its token ids."),
    "add_generation_prompt": ((True,), "Render the prompt yourself, and send its token ids."),
    "continue_final_message": ((False,), "Render the prompt yourself, and send its token ids."),
    "truncate_prompt_tokens": ((), "Shorten the prompt yourself."),
    "suffix": (("",), "Put everything into the prompt."),
    "echo": ((False,), "The answer's prompt_token_ids hold the prompt: return_token_ids."),
    "prompt_logprobs": ((0,), "Use the Tinker API of this hub for log-probabilities of prompts."),
    "include_stop_str_in_output": ((False,), "The answer's token_ids hold the whole completion: return_token_ids."),
    "kv_transfer_params": (({},), "Leave it out."),
}
"""For each option: its neutral values (those without effect), and advice for users of other values. None is always
neutral."""
_FAMILIES: Final = re.compile(r"(guided|dry|xtc|mirostat|dynatemp)_?.*")


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise UnsupportedOption for the first option in `body` that the hub does not offer."""
    for name, value in body.items():
        if value is None:
            continue
        if name in _NEUTRAL:
            neutral, advice = _NEUTRAL[name]
            # In Python, True equals 1: compare booleans only with booleans.
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
                raise UnsupportedOption(name, got=_shown(value), do=advice)
        elif _FAMILIES.fullmatch(name) and value not in (0, False, "", [], {}):
            raise UnsupportedOption(name, got=_shown(value), do=_NO_FORMS if name.startswith("guided") else _NO_SHAPING)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
