"""`echo-hub sft`: fine-tune, on demonstrations, the model with which a run starts."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from echo_hub.commands.progress_line import progress_line
from echo_hub.config.file import load_config
from echo_hub.evaluation.work_count import WorkCount
from echo_hub.lifecycle.beside_hub import RunArgument, check_writable
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.learner.sft import SftProgress
    from echo_hub.lifecycle.sft import Finetuned, PreparedSft

console = Console(soft_wrap=True, highlight=False)
_SHOWN_LINES = 10


def sft(
    run_directory: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Demonstrations, one JSON object per line.")],
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Passes over the demonstrations.")] = 3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per update, prompts included.")] = 8192,
    learning_rate: Annotated[float, typer.Option(help="Adam's peak learning rate.")] = 2e-4,
    heldout: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the prompts used only for measuring, never for training.")
    ] = 0.05,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the order; default: the run's seed.")] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Also evaluate the task's held-out problems, before and after.")
    ] = False,
    anew: Annotated[bool, typer.Option("--anew", help="Discard what was trained with other options.")] = False,
    figures_json: Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.")] = None,
) -> None:
    """Fine-tune, on demonstrations, the model with which a run starts, before the run is served. Repeat the command to
    resume."""
    from echo_hub.learner.sft_plan import SftSettings
    from echo_hub.lifecycle.sft import finetune, prepare

    directory = RunDirectory(run_directory)
    directory.check()
    check_writable(figures_json)
    config = load_config(directory.config, {})
    config.check_trains()
    if learning_rate <= 0:
        raise ConfigError("The learning rate must be above 0.", got=f"--learning-rate {learning_rate}")
    options = SftSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        heldout=heldout,
        seed=config.run.seed if seed is None else seed,
    )
    with directory.locked(), _stopping() as stop:
        prepared = prepare(directory, config, file, options)
        _print_what(prepared)
        shown = _Shown(prepared)
        with progress_line(shown.count):
            done = finetune(prepared, anew=anew, watcher=shown, stop=stop)
    if done is None:
        typer.echo(
            f"Stopped after update {shown.count.done}. Nothing is lost: the same command resumes there.", err=True
        )
        return
    figures = _figures(prepared, done, evaluate=evaluate)
    if figures_json is not None:
        figures_json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console.print(f"The adapter is in {done.adapter}; the run starts with it. Next: echo-hub serve {run_directory}")


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets. A second signal ends the process as usual."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def heard(*_: object) -> None:
        stop.set()
        restore()

    for number in numbers:
        signal.signal(number, heard)
    try:
        yield stop
    finally:
        restore()


def _print_what(prepared: PreparedSft) -> None:
    found, plan = prepared.found, prepared.plan
    trained = len(found.examples) - len(plan.heldout)
    console.print(
        f"{len(found.examples)} demonstrations: {trained} to train on, {len(plan.heldout)} held out; "
        f"{len(plan.batches)} updates"
    )
    limit = prepared.config.sampling.max_tokens
    for lines, why in (
        (found.long_replies, f"a reply is longer than sampling.max_tokens = {limit}, its stop token included"),
        (found.long_conversations, "longer than the base's context"),
    ):
        if lines:
            more = ", ..." if len(lines) > _SHOWN_LINES else ""
            shown = ", ".join(map(str, lines[:_SHOWN_LINES]))
            console.print(Text(f"Skipped {len(lines)}: {why} (lines {shown}{more})"))
    first, codec = found.examples[0], prepared.codec
    trained_ids = first.completion_ids[first.loss_mask]
    console.print(Text(f"First prompt, as a node sees it:  {codec.text(first.prompt_ids)}", style="dim"))
    console.print(Text(f"  text that is trained on:        {codec.text(trained_ids)}", style="dim"))


class _Shown:
    """Prints a line for each epoch, and counts the updates."""

    def __init__(self, prepared: PreparedSft) -> None:
        self._epochs = prepared.options.epochs
        self._told: SftProgress | None = None
        self.count = WorkCount(doing="Training", units="updates", total=len(prepared.plan.batches))

    def tell(self, progress: SftProgress) -> None:
        before = self._told
        if before is None and progress.update:
            print(f"Resuming after update {progress.update}.", flush=True)
        if progress.heldout_losses and not (before and before.heldout_losses):
            print(f"{'Before':<14} held out: {_loss(progress.heldout_losses[0])}", flush=True)
        for epoch in range(len(before.training_losses) if before else 0, len(progress.training_losses)):
            held = progress.heldout_losses[epoch + 1 : epoch + 2]
            behind = f"; held out: {_loss(held[0])}" if held else ""
            name = f"Epoch {epoch + 1} of {self._epochs}"
            print(f"{name:<14} trained: {progress.training_losses[epoch]:.4f}{behind}", flush=True)
        self._told, self.count.done = progress, progress.update
        self.count.begin(time.monotonic())


def _loss(nats: float) -> str:
    return f"{nats:.4f} nats per token, perplexity {math.exp(nats):.3f}"


def _figures(prepared: PreparedSft, done: Finetuned, *, evaluate: bool) -> dict[str, Any]:
    from echo_hub.lifecycle.export import evaluate_adapters
    from echo_hub.lifecycle.sft import figures

    if done.progress.outliers:
        console.print(f"Updates skipped because their gradient was an outlier: {done.progress.outliers}")
    found = figures(done.progress)
    if evaluate:
        count = WorkCount(doing="Evaluating", units="completions")
        adapters = {0: done.began_with, 1: done.adapter}
        with progress_line(count):
            measured = asyncio.run(evaluate_adapters(prepared.config, adapters, count=count)).evaluations
        for result in measured:
            label = "Before" if result.policy_version == 0 else "After"
            console.print(f"{label:<14} {result.text} of {result.num_problems} held-out problems")
        found["evaluations"] = [asdict(result) for result in measured]
    return found
