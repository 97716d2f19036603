"""`echo-hub chat`: talk with a version of a run in the terminal."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.process.importing import uncollected

if TYPE_CHECKING:
    from echo_hub.config.sections import HubConfig
    from echo_hub.run.base_model import PromptCodec
    from echo_hub.talking.conversation import Conversation, Ids
    from echo_hub.talking.talker import ReplyPart, Talker

HELP: Final = """/version K        talk with version K from now on, in a new conversation; 0 is the base model
/temperature T    0 draws the likeliest tokens
/tokens N         most tokens of a reply
/reset            begin a new conversation
/help             these lines
Ctrl-C stops a reply or discards the line, Ctrl-D ends."""


def chat(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@K]", help="The run's directory, and a version; @0 is the base model.")
    ],
    version: Annotated[int | None, typer.Option(min=0, help="As @K. Default: the newest published.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Reply to this, and end; - reads stdin.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=64, help="With --prompt: number of replies.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="0 = the likeliest tokens; default: the run's.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a reply; default: the run's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed draws the same replies.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt; default: the run's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps; default: the learner's.")] = "",
) -> None:
    """Talk with a version under the run's own conditions: its sampler, chat template, system prompt and prompt suffix.

    Works while the run's hub serves; the command then needs memory for its own copy of the base model. If the learner
    fills the GPU, add --device cpu.
    """
    directory, asked = _run_of(run, version)
    directory.check()
    config = load_config(directory.config, {})
    if samples > 1 and prompt is None:
        raise ConfigError("Several replies need one prompt.", got=f"--samples {samples}", do="Add --prompt TEXT.")
    with uncollected():
        from echo_hub.talking.settings import newest_version

    state = _State(
        directory=directory,
        version=newest_version(directory) if asked is None else asked,
        temperature=config.sampling.temperature if temperature is None else temperature,
        max_tokens=config.sampling.max_tokens if max_tokens is None else max_tokens,
        seed=secrets.randbelow(2**32) if seed is None else seed,
    )
    chatting = _opened(config, state, system=system, device=device)
    if prompt is not None:
        chatting.reply_once(sys.stdin.read() if prompt == "-" else prompt, samples)
        return
    chatting.talk()


def _run_of(run: str, version: int | None) -> tuple[RunDirectory, int | None]:
    """Parse RUN[@K]. Raises ConfigError if K is not a number, or contradicts --version."""
    if Path(run).is_dir():
        return RunDirectory(Path(run)), version
    path, found, number = run.rpartition("@")
    if not found:
        return RunDirectory(Path(run)), version
    if not number.isdecimal() or (version is not None and int(number) != version):
        raise ConfigError(
            "The version is not clear.",
            got=f"{run}{'' if version is None else f' --version {version}'}",
            do="Write RUN@K with a number K, or RUN --version K.",
        )
    return RunDirectory(Path(path)), int(number)


@dataclass(slots=True, kw_only=True)
class _State:
    """The settings that the user may change during the conversation."""

    directory: RunDirectory
    version: int
    temperature: float
    max_tokens: int
    seed: int
    adapter: Path | None = field(init=False)

    def __post_init__(self) -> None:
        self.choose(self.version)

    def choose(self, version: int) -> None:
        """Continue the conversation with another version. Raises ConfigError if the version does not exist."""
        from echo_hub.talking.settings import adapter_for

        self.adapter = adapter_for(self.directory, version)
        self.version = version

    @property
    def label(self) -> str:
        return f"version {self.version}" if self.version else "the base model"


def _opened(config: HubConfig, state: _State, *, system: str | None, device: str) -> _Chat:
    """Load the model and its tokenizer. Raises ConfigError and LearnerError."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not config.learner.base_bits:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, but this model does not use it.
    with uncollected():
        from transformers.utils.logging import disable_progress_bar

        from echo_hub.run.base_files import resolve_base
        from echo_hub.run.base_model import PromptCodec
        from echo_hub.talking.settings import talking_settings
        from echo_hub.talking.talker import Talker

    disable_progress_bar()
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    if system is not None:
        codec = codec.with_words(system_prompt=system, prompt_suffix=config.task.prompt_suffix)
    settings = talking_settings(config, base_dir=base_dir, codec=codec, device=device)
    return _Chat(Talker.open(settings), codec, state, run_name=config.run.name)


class _Chat:
    def __init__(self, talker: Talker, codec: PromptCodec, state: _State, *, run_name: str) -> None:
        self._talker = talker
        self._codec = codec
        self._state = state
        self._run_name = run_name
        self._turns = 0

    def reply_once(self, prompt: str, samples: int) -> None:
        """Print the replies to one prompt. A single reply is printed token by token, several replies at the end."""
        from echo_hub.talking.conversation import Conversation, TextStream

        conversation = Conversation(self._codec)
        prompt_ids = conversation.prompt(prompt)
        streams = [TextStream(self._codec) for _ in range(samples)]
        for part in self._parts(conversation, prompt_ids, samples):
            piece = streams[part.index].more(part.ids, is_end=bool(part.finish))
            if samples == 1:
                _say(piece)
        if samples == 1:
            _say("\n")
        for number, stream in enumerate(streams if samples > 1 else (), start=1):
            _say(f"--- {number} of {samples}\n{stream.text}\n")

    def talk(self) -> None:
        """Reply to each line from the terminal until the input ends."""
        from echo_hub.talking.conversation import Conversation

        conversation = Conversation(self._codec)
        typer.echo(f"{self._run_name}, {self._state.label}. /help lists the commands, Ctrl-D ends.", err=True)
        while (line := _read_line()) is not None:
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if self._obey(line):
                        conversation = Conversation(self._codec)
                else:
                    self._reply(conversation, line)
            except ConfigError as error:
                typer.echo(str(error), err=True)
            except KeyboardInterrupt:  # Before the reply's first token.
                typer.echo("(stopped)", err=True)

    def _reply(self, conversation: Conversation, text: str) -> None:
        import numpy as np

        from echo_hub.talking.conversation import TextStream

        prompt_ids, stream, drawn = conversation.prompt(text), TextStream(self._codec), []
        finish = "stopped"
        try:
            for part in self._parts(conversation, prompt_ids, 1):
                drawn.append(part.ids)
                finish = part.finish
                _say(stream.more(part.ids, is_end=bool(part.finish)))
        except KeyboardInterrupt:
            finish = "stopped"
        _say("\n")
        if finish in ("length", "stopped"):
            why = f"cut off after {sum(map(len, drawn))} tokens" if finish == "length" else "stopped"
            typer.echo(f"({why})", err=True)
        if drawn:
            conversation.take(prompt_ids, np.concatenate(drawn))

    def _parts(self, conversation: Conversation, prompt_ids: Ids, samples: int) -> Iterator[ReplyPart]:
        self._turns += 1
        return self._talker.reply(
            prompt_ids,
            adapter=self._state.adapter,
            samples=samples,
            temperature=self._state.temperature,
            max_tokens=conversation.room(prompt_ids, self._state.max_tokens),
            seed=self._state.seed + self._turns - 1,
        )

    def _obey(self, line: str) -> bool:
        """Carry out a command such as /version. Return True if a new conversation begins. Raises ConfigError for a
        wrong command."""
        name, _, given = line[1:].strip().partition(" ")
        state = self._state
        if name == "reset":
            typer.echo("A new conversation.", err=True)
            return True
        if name == "version" and given.isdecimal():
            state.choose(int(given))
            typer.echo(f"A new conversation, with {state.label}.", err=True)
            return True
        if name == "tokens" and given.isdecimal() and int(given) > 0:
            state.max_tokens = int(given)
        elif name == "temperature" and _temperature(given) is not None:
            state.temperature = _temperature(given) or 0.0
        elif name == "help":
            typer.echo(HELP, err=True)
        else:
            raise ConfigError("There is no such command.", got=line, do=f"The commands are:\n{HELP}")
        return False


def _temperature(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0 <= found <= 100 else None


def _read_line() -> str | None:
    """Return the next line that the user types; None at the end. Ctrl-C discards the line."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    with contextlib.suppress(ImportError):  # Windows has no readline.
        importlib.import_module("readline")  # With readline, input() has editing and a history.
    try:
        return input("> ")
    except EOFError:
        typer.echo("", err=True)
        return None
    except KeyboardInterrupt:
        typer.echo("\n(Ctrl-D ends.)", err=True)
        return ""


def _say(text: str) -> None:
    """Print a part of a reply, with characters that could control the terminal written out."""
    from echo_hub.dashboard.formats import visible

    sys.stdout.write(visible(text))
    sys.stdout.flush()
