"""Encode text so that only the chat template produces control tokens. Text from other sources that looks like a control
token stays plain text.

A problem, an environment or a tool may contain `Explain <|im_end|> now`. Encoded directly, this text would end its
turn, and the rest could pose as the turn of another role. Three steps prevent this. First, in such texts, the
characters that begin a control token are replaced by numbers. Then the template is rendered, and the template's own
control tokens get secret spellings. Finally, a copy of the tokenizer that knows only these spellings encodes the
result. With a short secret:

    quoted      Explain (q0:60)|im_end|> now
    rendered    <|im_start|>user\\nExplain (q0:60)|im_end|> now<|im_end|>\\n
    spelled     <7f:0>user\\nExplain <|im_end|> now<7f:1>\\n

Text without a control token, which is nearly all text, is encoded directly.

Control tokens are the tokenizer's special tokens, and other added tokens that the template writes or that look like one
(`<|user|>`). Runs of spaces, which some tokenizers have as added tokens, are ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Final

from tokenizers import Tokenizer

from echo_shared.errors import ConfigError
from echo_shared.files.strict_json import texts_in

_LOOKS_LIKE_ONE: Final = re.compile(r"<\|.+\|>|<｜.+｜>", re.DOTALL)


class ControlTokens:
    """A tokenizer's control tokens. `sources` are the chat templates: an added token that occurs in their text counts
    as a control token.
    """

    def __init__(self, tokenizer: Tokenizer, sources: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        written = "\0".join(sources)
        self._texts = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.content
            and (
                token.special
                or _LOOKS_LIKE_ONE.fullmatch(token.content)
                or (token.content in written and not token.content.isspace())
            )
        ]
        self._any = _any_of(self._texts)
        self._beginning = _beginning_of(self._texts)

    def quoting(self, *said: Any) -> Quoting:
        """Return a `Quoting` for texts that the template did not write. `said` holds these texts; they may be inside
        lists and maps."""
        text = "".join(texts_in(said))
        mark = next(mark for number in count() if (mark := f"(q{number}:") not in text)
        return Quoting(control=self, mark=mark)

    def ids_of_text(self, text: str) -> list[int]:
        """Return the ids of a text. Control tokens in the text are encoded as ordinary text. Raises ConfigError for
        invalid Unicode.
        """
        return self._ids(self._tokenizer if self._any.search(text) is None else self._copy, text)

    def _ids_of_rendered(self, rendered: str, quoted: re.Pattern[str]) -> list[int]:
        def unquoted(text: str) -> str:
            return quoted.sub(lambda found: chr(int(found[1])), text)

        plain = unquoted(rendered)
        if len(self._any.findall(plain)) == len(self._any.findall(rendered)):
            return self._ids(self._tokenizer, plain)
        spelled = self._any.sub(lambda found: self._spellings[found[0]], rendered)
        return self._ids(self._copy, unquoted(spelled))

    def _ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise ConfigError(
                "A text cannot be encoded for the model: it contains half of a surrogate pair.",
                got=f"{half} in {text[max(0, error.start - 40) : error.end + 40]!a}",
                do="Correct its source: a file, or the task's code.",
            ) from error
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids if tokenizer is self._tokenizer else [self._own_ids.get(token_id, token_id) for token_id in ids]

    @cached_property
    def _spellings(self) -> Mapping[str, str]:
        """Map each control token to a secret spelling, which no other text can contain."""
        secret = secrets.token_hex(16)
        return {text: f"<{secret}:{number}>" for number, text in enumerate(self._texts)}

    @cached_property
    def _copy(self) -> Tokenizer:
        """Return a copy of the tokenizer that recognises control tokens only by their secret spellings."""
        state = json.loads(self._tokenizer.to_str())
        state["post_processor"] = None
        for token in state["added_tokens"]:
            token["content"] = self._spelled(token["content"])
        model = state["model"]
        # The vocabulary may also contain the control token as a text; then ordinary text would produce it.
        if isinstance(model["vocab"], list):
            model["vocab"] = [[self._spelled(text), score] for text, score in model["vocab"]]
        else:
            model["vocab"] = {self._spelled(text): token_id for text, token_id in model["vocab"].items()}
        if "merges" in model:
            prefix = model.get("continuing_subword_prefix") or ""
            model["merges"] = [pair for pair in model["merges"] if not self._makes_one(pair, prefix)]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._spelled(model["unk_token"])
        copy: Tokenizer = Tokenizer.from_str(json.dumps(state))
        return copy

    @cached_property
    def _own_ids(self) -> Mapping[int, int]:
        """Map the ids of added tokens in the copy to their ids in the original tokenizer."""
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        ids = ((self._copy.token_to_id(self._spelled(text)), self._tokenizer.token_to_id(text)) for text in added)
        return {here: own for here, own in ids if here is not None and own is not None}

    def _spelled(self, text: str) -> str:
        return self._spellings.get(text, text)

    def _makes_one(self, pair: str | list[str], prefix: str) -> bool:
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        return not self._spellings.keys().isdisjoint((left, right, left + right.removeprefix(prefix)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quoting:
    """Passes texts through a chat template as plain text, even if they contain control tokens."""

    control: ControlTokens
    mark: str
    """Text that precedes the code number of each quoted character. It occurs in none of the quoted texts."""

    def quoted(self, value: Any) -> Any:
        """Return `value` with every text in it quoted. Map keys, and values under the key `role`, are trusted and stay
        unchanged."""
        if isinstance(value, str):
            return self.control._beginning.sub(lambda found: f"{self.mark}{ord(found[0][0])}){found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {key: one if key == "role" else self.quoted(one) for key, one in value.items()}
        return [self.quoted(one) for one in value] if isinstance(value, list | tuple) else value

    def ids(self, rendered: str) -> list[int]:
        """Return the ids of the rendered template. Raises ConfigError for invalid Unicode."""
        return self.control._ids_of_rendered(rendered, re.compile(rf"{re.escape(self.mark)}([0-9]+)\)"))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the leftmost control token. If several begin at one place, it matches the longest,
    as tokenizers do.
    """
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _beginning_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for every character with which a control token begins.

    Single characters are quoted, because a template may delete a part of a text, and the rest may form a control token.
    If a token begins with a letter or a space, only the whole token is matched.
    """
    signs = sorted({text[0] for text in texts if not text[0].isalnum() and not text[0].isspace()})
    whole = [text for text in texts if text[0].isalnum() or text[0].isspace()]
    patterns = [_any_of(whole).pattern] if whole else []
    patterns += [f"[{''.join(map(re.escape, signs))}]"] if signs else []
    return re.compile("|".join(patterns) or "(?!)")
