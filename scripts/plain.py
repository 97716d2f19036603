"""Check how plainly docstrings, comments and Markdown pages are written.

    python -m scripts.plain PATH...

A path is a file or a directory. The check counts three things, and fails if the share of one exceeds its limit:

- hollow sentences: `HOLLOW_SHARE` or more of the words are function words, so the nouns are missing;
- function docstrings that begin with a pronoun, an article or a preposition instead of a verb;
- sentences with a worn phrase, for which a term of the field exists.

Only sentences of `SHORTEST` to `LONGEST` words count. Code spans, fenced code, tables and headings do not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS: Final = _words(
    """
    a an the this that these those it its itself they them their theirs he him his she her who whom whose which what
    whatever whoever i we us our you your one ones some any each every all both no none nobody nothing neither either
    other others another such same as at by for from in into of off on onto out over to under until up upon with within
    without beside beyond between among through during before after behind and or but nor so yet if then than though
    although because while when where whether how why is are was were be been being am do does did done has have had
    having will would shall should can could may might must there here not only also too very much many more most less
    least again anew once ever never always still already just even else instead about against apart alone own
    """
)
NO_VERBS: Final = _words(
    """
    what whether of whoever who which that it its all as by in on at for from to with where when how so no one some
    those these they them the a an his her there
    """
)
WORN: Final = re.compile(
    r"\b(anew|whoever|nobody|so many|beside|gone on with|is to be|are to be|what is|of which|by whom|none the|at hand"
    r"|lets? go of|lets? itself)\b",
    re.IGNORECASE,
)
HOLLOW_SHARE: Final = 0.6
SHORTEST: Final = 12
LONGEST: Final = 34

WORD: Final = re.compile(r"[A-Za-z][A-Za-z'’-]*")
SENTENCE_END: Final = re.compile(r"(?<=[.!?:;])\s+")
CODE_SPAN: Final = re.compile(r"``?[^`]*``?")
FENCED: Final = re.compile(r"```.*?```", re.DOTALL)
BLOCK: Final = re.compile(r"[^\n]*\S[^\n]*(\n[^\n]*\S[^\n]*)*")
"""Matches a paragraph: adjacent lines with text."""
CODE_OR_LINK: Final = re.compile(r"`[^`]*`|\[([^]]*)\]\([^)]*\)")
DIRECTIVE: Final = re.compile(r"#\s*(type:|noqa|pragma|!)")
SKIPPED: Final = frozenset({".venv", "node_modules", "build", ".git"})
"""Directories with files of other projects, which are not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A docstring, a block of comments, or a paragraph of a page."""

    line: int
    text: str
    documents_function: bool = False


@dataclass(slots=True, kw_only=True)
class Count:
    """The texts that one check has found faulty, and the number of all texts that it checked."""

    name: str
    limit_percent: float
    texts: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, finding: str, *, found: bool) -> None:
        self.texts += 1
        if found:
            self.findings.append(finding)

    @property
    def percent(self) -> float:
        return 100 * len(self.findings) / max(1, self.texts)

    @property
    def exceeded(self) -> bool:
        return self.percent > self.limit_percent

    def __str__(self) -> str:
        return f"{self.name}: {len(self.findings)} of {self.texts} ({self.percent:.2f} %, limit {self.limit_percent} %)"


def main(arguments: Sequence[str]) -> int:
    """Print the figures, and the findings of each exceeded limit. Return 1 if a limit is exceeded, else 0."""
    counts = measure([Path(argument) for argument in arguments])
    exceeded = [count for count in counts if count.exceeded]
    for count in exceeded:
        print(*(f"{finding} [{count.name}]" for finding in count.findings), sep="\n")
    print(*counts, sep="\n")
    return int(bool(exceeded))


def measure(paths: Sequence[Path]) -> tuple[Count, Count, Count]:
    """Count hollow sentences, docstrings that do not begin with a verb, and sentences with worn phrases."""
    hollow = Count(name="hollow sentences", limit_percent=4.0)
    verbless = Count(name="docstrings that begin with a pronoun", limit_percent=10.0)
    worn = Count(name="sentences with a worn phrase", limit_percent=0.3)
    for path in (file for top in paths for file in _files(top)):
        for passage in passages(path):
            place = f"{path}:{passage.line}: "
            first = WORD.search(passage.text)
            if passage.documents_function and first is not None:
                verbless.add(place + " ".join(passage.text.split())[:80], found=first.group().lower() in NO_VERBS)
            for sentence in sentences(passage.text):
                hollow.add(place + sentence, found=function_share(sentence) >= HOLLOW_SHARE)
                worn.add(place + sentence, found=WORN.search(sentence) is not None)
    return hollow, verbless, worn


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of `SHORTEST` to `LONGEST` words, with each code span replaced by one letter."""
    for sentence in SENTENCE_END.split(CODE_SPAN.sub("X", " ".join(text.split()))):
        if SHORTEST <= len(WORD.findall(sentence)) <= LONGEST:
            yield sentence


def function_share(sentence: str) -> float:
    """Return the share of function words in a sentence of at least one word."""
    words = WORD.findall(sentence.lower())
    return sum(word in FUNCTION_WORDS for word in words) / len(words)


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a Python file or a Markdown page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _paragraphs(text)
    else:
        yield from _docstrings(ast.parse(text))
        yield from _comments(text)


def _files(top: Path) -> list[Path]:
    found = [top] if top.is_file() else sorted(top.rglob("*"))
    return [path for path in found if path.suffix in (".py", ".md") and not SKIPPED.intersection(path.parts)]


def _paragraphs(text: str) -> Iterator[Passage]:
    text = FENCED.sub(lambda fenced: "\n" * fenced.group().count("\n"), text)
    for block in BLOCK.finditer(text):
        if not block.group().lstrip().startswith(("|", "#")):
            line = text.count("\n", 0, block.start()) + 1
            yield Passage(line=line, text=CODE_OR_LINK.sub(r"\1", block.group()))


def _docstrings(tree: ast.Module) -> Iterator[Passage]:
    """Yield each string that is a statement. A string below an attribute is the attribute's docstring."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, statement in enumerate(body if isinstance(body, list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    is_first = place == 0 and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    yield Passage(line=statement.lineno, text=text, documents_function=is_first)


def _comments(text: str) -> Iterator[Passage]:
    """Yield comments on adjacent lines as one passage."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        line = token.start[0]
        if line != start + len(block):
            if block:
                yield Passage(line=start, text=" ".join(block))
            block, start = [], line
        block.append(token.string.lstrip("# "))
    if block:
        yield Passage(line=start, text=" ".join(block))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
