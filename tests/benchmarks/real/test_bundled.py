"""One forgery of each kind, planted in the bundle of a small run, is found and named."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.forging import changed
from benchmarks.real.bundled import all_of, planted
from echo_hub.bundles.reading import Bundle
from echo_hub.bundles.report import as_json
from echo_hub.config.file import load_config
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_shared.signing.identity import Identity
from tests.echo_hub.bundles.conftest import STEPS, bundle, hub_key, run
from tests.echo_hub.bundles.test_checking import checked

__all__ = ["bundle", "hub_key", "run"]
SHARE = 0.9
SEED = 5


def test_every_planted_forgery_is_named(run: RunDirectory, bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    config, base = load_config(run.config, {}), resolve_base("builtin:tiny")
    settings = LearnerSettings.of_run(config, base_dir=base, stop_ids=PromptCodec.of_run(config, base).stop_ids)
    policy = Policy.load(settings)
    (tmp_path / "other").mkdir()
    policy.save_adapter(tmp_path / "other", {name: weight + 0.1 for name, weight in policy.parameters.items()})
    forgeries = planted(
        Bundle.open(bundle), settings, policy, other=tmp_path / "other", share=SHARE, seed=SEED, step=STEPS
    )
    files = {name: change for one in forgeries for name, change in one.files.items()}
    forged = changed(bundle, tmp_path / "forged", hub_key, groups=all_of(forgeries), files=files)
    found = as_json(checked(forged, share=SHARE, seed=SEED, repeats_step=True))["discrepancies"]
    texts = {one.name: one.text(found) for one in forgeries}
    assert len(texts) == 6 and all(texts.values()), (texts, found)
    honest = as_json(checked(bundle, share=SHARE, seed=SEED, repeats_step=True))["discrepancies"]
    assert honest == [] and not any(one.text(honest) for one in forgeries)
