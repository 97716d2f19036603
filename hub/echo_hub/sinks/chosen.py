"""Create the metric sinks (writers for other programs, such as TensorBoard) that a run's settings request. A
`Following` feeds each writer."""

from __future__ import annotations

from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.source import Changes
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.sinks.following import EntryWriter, Following
from echo_hub.sinks.texts import SampleTexts
from echo_hub.sinks.wandb_sink import WandB
from echo_hub.store.async_store import AsyncStore


def chosen_sinks(
    config: HubConfig,
    root: Path,
    run_id: str,
    store: AsyncStore,
    changes: Changes,
    *,
    codec: PromptCodec,
    problems: Problems,
) -> list[Following]:
    """Return one `Following` for each requested writer. `root` is the run's directory. Raises ConfigError if a package
    is missing.
    """
    writers: list[EntryWriter] = []
    if config.metrics.tensorboard:
        from echo_hub.sinks.tensorboard import TensorBoard  # Import here: the import takes a fraction of a second.

        writers.append(TensorBoard(root / "tensorboard"))
    if config.metrics.wandb != "off":
        writers.append(WandB(config, directory=root / "wandb", run_id=run_id))
    texts = SampleTexts(config.metrics, store=store.store, codec=codec, problems=problems)
    return [Following(writer, store.store, store.server, changes, texts=texts) for writer in writers]
