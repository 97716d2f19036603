"""The metric sinks that a run's settings ask for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.sinks.base import MetricSink
from echo_hub.sinks.following import Following
from echo_hub.sinks.reading import Reading
from echo_hub.sinks.texts import SampleTexts
from echo_hub.sinks.wandb_sink import WandB
from echo_hub.store.async_store import AsyncStore


def chosen_sinks(
    config: HubConfig, root: Path, run_id: str, store: AsyncStore, *, codec: PromptCodec, problems: Problems
) -> list[Following]:
    """Each with what follows the store for it; `root` is the run's directory."""
    sinks: list[MetricSink] = []
    if config.metrics.tensorboard:
        from echo_hub.sinks.tensorboard import TensorBoard  # It takes a part of a second, of every hub's start.

        sinks.append(TensorBoard(root / "tensorboard"))
    if config.metrics.wandb != "off":
        sinks.append(WandB(config, directory=root / "wandb", logs=root / "logs", run_id=run_id))
    texts = SampleTexts(config.metrics, store=store.store, codec=codec, problems=problems)
    return [Following(sink, partial(Reading, store.store, texts=texts), store.server) for sink in sinks]
