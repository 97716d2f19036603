"""Find out if llama.cpp encodes text with a GGUF file as the base model's tokenizer does.

    python -m echo_hub.lifecycle.gguf.reading FILE

llama.cpp ends its process for some broken vocabularies, so it runs in a separate process. The process takes one JSON
line with texts and readings (rules for splitting text), and answers with one JSON line for each reading.

Texts of two kinds are compared. Prompts of the run and everyday text must get exactly the tokenizer's token ids. For
rare text, and for text with characters that the tokenizer does not know, differences are only reported.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_hub.lifecycle.gguf.vocabulary import Reading, Vocabulary
from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import ConfigError
from echo_shared.installation import how_to_install

EVERYDAY: Final = (
    "Hello, world! How are you today?",
    "I'm sure they'll say it's WE'VE DONE; you'd agree, won't you?",
    "What is 17 + 25? 17+25=42, 3.14159, 1,000,000 and 2026-11-29T10:54:37Z.",
    "0 1 22 333 4444 55555 666666 7777777 88888888 999999999",
    "  two spaces,   three,    four;\ttab\t\ttwo tabs \n\n\n three line ends\r\n and a Windows one\r\n",
    " a space before, and one after ",
    "\n",
    "def f(x: int) -> list[int]:\n    return [x ** 2 for _ in range(10) if x != 0]  # squares\n",
    '{"name": "Ada", "ids": [1, 2, 3], "ok": true, "nested": {"a": null}}',
    "<think>\nLet x = 3.\n</think>\n\n<answer>12</answer>",
    "\\[ \\frac{1}{2} \\int_0^\\infty e^{-x^2} dx = \\frac{\\sqrt{\\pi}}{4} \\]",
    "https://example.org/path?query=a%20b&lang=en#part-2, user@example.org",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX; TheQuickBrownFox, the_quick_brown_fox.",
    "Übergrößenträger fährt über Straßen; el niño comió piñas; garçon à l'œuvre; České Budějovice, Łódź.",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- [ ] one\n- [x] two\n\n1. first\n2. second\n",
)
"""Texts whose token ids must not differ."""
RARE: Final = (
    "今天天气很好，我们去公园散步吧。日本語の文章、カタカナ、ひらがな。한국어 문장입니다.",
    "Привет, мир! Как дела? Ελληνικά, עברית, العربية ١٢٣, हिन्दी १२३, ไทย ๑๒๓.",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 🙂🙃",
    "e\u0301 o\u0308 n\u0303 (combining), ﬁ ligature, Ⅳ ½ ² ₃, １２３ full width",
    "zero\u200bwidth, no\u00a0break, thin\u2009space, \u3000wide, bom\ufeff, soft\u00adhyphen",
    "\x00\x01\x7f control characters \x1b[31mred\x1b[0m",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!!!!!!!!!!!!! ................ ----------------",
    "                                                                        far to the right",
    "\n\n\n\n\n\n\n\n\t\t\t\t\t\t\t\t",
    "'s 'S 'T 're 'RE 'Ve 'lL 'd's't ''' \"\"\" ``` ´ ‘curly’ “quotes” — – … • · €£¥",
)
"""Texts whose token ids may differ; differences are reported."""
_TURNS: Final = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "2 + 2 = 4."},
    {"role": "user", "content": 'And 3 + 3, "quoted"?\nAnswer in one line.'},
)
_SHOWN: Final = 60
_LAST_WORDS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The reading (rule for splitting text) with which llama.cpp agrees best with the base's tokenizer. The other
    fields hold the texts and stop ids for which the two still differ."""

    reading: Reading
    everyday: tuple[str, ...]
    """Conversations and everyday texts that llama.cpp encodes with other ids than the tokenizer does."""
    rare: tuple[str, ...]
    unended: tuple[int, ...]
    """Stop ids of the base model that do not end a reply in llama.cpp."""

    @property
    def num_different(self) -> int:
        """Return a number by which readings are compared; 0 means no difference. One difference in everyday text counts
        more than all differences in rare texts together."""
        return len((*EVERYDAY, *RARE, "")) * len(self.everyday) + len(self.rare)


def best_reading(file: Path, vocabulary: Vocabulary, codec: PromptCodec) -> Readings:
    """Return the reading of `vocabulary` with which llama.cpp encodes the most texts in the same way as `codec`. `file`
    holds the vocabulary's fields.

    Raises ConfigError if llama.cpp is missing or cannot load the vocabulary.
    """
    known = [(text, codec.ids_of_plain(text)) for text in EVERYDAY]
    unknown_id = vocabulary.unknown_id
    everyday = [*conversations(codec), *(pair for pair in known if unknown_id not in pair[1])]
    rare = [pair for pair in known if unknown_id in pair[1]] + [(text, codec.ids_of_plain(text)) for text in RARE]
    texts = [text for text, _ in (*everyday, *rare)]
    # With any rule, llama.cpp does not normalise text before BPE, so these texts must differ.
    unavoidable = {text for text in texts if vocabulary.is_split_by_rules and codec.normalized(text) != text}
    best: Readings | None = None
    for reading, read in _read(file, vocabulary.readings, texts, codec.stop_ids):
        of_everyday, of_rare = read["ids"][: len(everyday)], read["ids"][len(everyday) :]
        found = Readings(
            reading=reading,
            everyday=_different(everyday, of_everyday),
            rare=_different(rare, of_rare),
            unended=tuple(read["unended"]),
        )
        if best is None or found.num_different < best.num_different:
            best = found
        if unavoidable.issuperset(best.everyday + best.rare):
            break
    if best is None:
        raise ConfigError(
            "llama.cpp cannot load this base model's tokenizer.",
            got=f"none of {len(vocabulary.readings)} ways of reading its tokens",
            do="Export it as a directory for transformers: --merged instead of --gguf.",
        )
    return best


def check_reading(found: Readings) -> None:
    """Raise ConfigError if llama.cpp reads conversations or everyday text with other ids than the base's tokenizer."""
    if found.everyday:
        raise ConfigError(
            "llama.cpp would read everyday text with other tokens than this base model.",
            got=f"{len(found.everyday)} texts differ, for example {shown(found.everyday[0])}",
            do="Export it as a directory for transformers: --merged instead of --gguf.",
        )


def shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def conversations(codec: PromptCodec) -> Iterator[tuple[str, list[int]]]:
    """Yield conversations as the chat template renders them: their text, and the token ids that the hub trains on."""
    if not codec.is_chat:
        text = codec.render_opening(_TURNS[:1])
        yield text, codec.ids_of_plain(text)
        return
    for count in (1, len(_TURNS)):
        try:
            text = codec.render_opening(_TURNS[:count])
        except ConfigError:
            if count == 1:
                raise
            continue  # The template cannot render replies.
        yield text, codec.encode_opening(_TURNS[:count]).tolist()


def _different(expected: Sequence[tuple[str, list[int]]], read: Sequence[list[int]]) -> tuple[str, ...]:
    return tuple(text for (text, ids), found in zip(expected, read, strict=True) if ids != found)


def _read(
    file: Path, readings: Sequence[Reading], texts: Sequence[str], stop_ids: Sequence[int]
) -> Iterator[tuple[Reading, Any]]:
    """For each reading (rule for splitting text) with which llama.cpp can load the file, yield the token ids that it
    finds for the texts."""
    left = list(readings)
    while left:
        asked = json.dumps({"texts": texts, "readings": [dict(one) for one in left], "stop_ids": list(stop_ids)})
        command = [sys.executable, "-m", "echo_hub.lifecycle.gguf.reading", str(file)]
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as errors,  # A pipe would fill up, because no one reads it.
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(asked + "\n")
                process.stdin.close()
                for line in process.stdout:
                    answer = json.loads(line)
                    reading = left.pop(0)
                    if answer is not None:
                        yield reading, answer
                process.wait()
            finally:
                process.kill()
            errors.seek(0)
            said = errors.read()
        if process.returncode == _NO_LLAMA_CPP:
            raise ConfigError(
                "Only llama.cpp can write and check this file, and it is not installed.",
                do=how_to_install("cpu"),
            )
        if left:
            # If the process failed without a traceback, llama.cpp has ended it. The next process continues after this
            # reading.
            if process.returncode > 0 and "Traceback" in said:
                raise ConfigError("llama.cpp does not work here.", got=said[-_LAST_WORDS:], do=how_to_install("cpu"))
            left.pop(0)


_NO_LLAMA_CPP: Final = 3


def _serve(file: Path) -> int:
    try:
        import llama_cpp
    except ImportError:
        return _NO_LLAMA_CPP
    asked = json.loads(sys.stdin.readline())
    llama_cpp.llama_backend_init()
    for reading in asked["readings"]:
        answer = None
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        overrides = _overrides(llama_cpp, reading)
        params.kv_overrides = overrides
        model = llama_cpp.llama_load_model_from_file(str(file).encode(), params)
        if model:
            vocab = llama_cpp.llama_model_get_vocab(model)
            answer = {
                "ids": [_tokens(llama_cpp, vocab, text) for text in asked["texts"]],
                "unended": [one for one in asked["stop_ids"] if not llama_cpp.llama_vocab_is_eog(vocab, one)],
            }
            llama_cpp.llama_model_free(model)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def _overrides(llama_cpp: Any, reading: Reading) -> Any:
    """Return llama.cpp's array of overridden fields, which ends with an empty key."""
    overrides = (llama_cpp.llama_model_kv_override * (len(reading) + 1))()
    for place, (key, value) in zip(overrides, reading.items(), strict=False):
        place.key = key.encode()
        if isinstance(value, bool):
            place.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL
            place.value.val_bool = value
        else:
            place.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
            place.value.val_str = value.encode()
    return overrides


def _tokens(llama_cpp: Any, vocab: Any, text: str) -> list[int]:
    """Return the ids of a text, control tokens included, without a begin token of llama.cpp's own."""
    data = text.encode()
    size = len(data) + 16
    ids = (ctypes.c_int32 * size)()
    count = llama_cpp.llama_tokenize(vocab, data, len(data), ids, size, False, True)
    return list(ids[: max(count, 0)])


if __name__ == "__main__":
    sys.exit(_serve(Path(sys.argv[1])))
