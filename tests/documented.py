"""Find the commands in the documentation's pages, split them like a shell, and check them by the programs' own
parsers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROGRAMS = ("echo-hub", "echo-node", "make", "python", "pytest")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}(?:echo-|make |python ).*\n)+", re.MULTILINE)
_INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS)})(?: [^`]*)?)`")
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One program with its arguments. `output`: the file that its standard output goes to."""

    program: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    output: str | None = None

    def __str__(self) -> str:
        return shlex.join([self.program, *self.arguments])


def blocks(page: Path) -> Iterator[list[Command]]:
    """Yield the commands of each code block, in order; blocks without commands are skipped."""
    text = page.read_text(encoding="utf-8")
    for language, body in _FENCED.findall(text):
        if language in ("sh", "console"):
            yield list(_commands(_typed(body) if language == "console" else body))
    for body in _INDENTED.findall(_FENCED.sub("", text)):
        yield list(_commands(body))


def mentioned(page: Path) -> Iterator[Command]:
    """Yield the commands in running text. Optional parts, such as `[--for 2h]`, are left out."""
    for quoted in _INLINE.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        yield from _commands(re.sub(r"\[[^]]*\]", "", quoted))


def _typed(session: str) -> str:
    return "".join(f"{line[2:]}\n" for line in session.splitlines() if line.startswith("$ "))


def _commands(script: str) -> Iterator[Command]:
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(_COMMENT.sub("", line), posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in ("|", "||", "&&", ";"):
                yield from _command(words)
                words = []
            else:
                words.append(word)


def _command(words: list[str]) -> Iterator[Command]:
    output = words[words.index(">") + 1] if ">" in words else None
    words = words[: words.index(">")] if ">" in words else words
    environment = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        name, _, environment[name] = words.pop(0).partition("=")
    if words[:2] == ["sudo", "-u"]:
        words = words[3:]
    if words[:2] == ["podman", "run"]:  # A documented container image is named like its program.
        words = next((words[number:] for number, word in enumerate(words) if word in ("echo-hub", "echo-node")), [])
    if words and (program := words[0].removeprefix(".venv/bin/")) in PROGRAMS:
        yield Command(program=program, arguments=words[1:], environment=environment, output=output)


def check(root: Any, arguments: list[str], *, is_whole: bool) -> None:
    """Parse the arguments without running anything. `is_whole`: required arguments must be present.

    Raises AssertionError for an unknown command, and the parser's own error for an unknown option.
    """
    command, path, rest, context = root, [str(root.name)], arguments, None
    while True:
        context = command.context_class(command, info_name=path[-1], parent=context)
        given, rest, _ = command.make_parser(context).parse_args(list(rest))
        below = getattr(command, "commands", None)
        if below is None or not rest:
            break
        assert rest[0] in below, f"{' '.join(path)} has no command {rest[0]}"
        command, path, rest = below[rest[0]], [*path, rest[0]], rest[1:]
    assert rest == [], f"{' '.join(path)} does not take {rest}"
    if is_whole and below is None:
        lacking = [one.name for one in command.params if one.required and not given.get(one.name)]
        assert lacking == [], f"{' '.join(path)} needs {lacking}"
