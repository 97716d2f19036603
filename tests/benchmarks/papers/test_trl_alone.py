from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.papers.trl_alone import main, settings
from echo_hub.commands.demo_settings import DemoTask, demo_settings


def test_its_settings_equal_the_demos() -> None:
    config = settings(7, 3)
    assert config.sampling.max_tokens == demo_settings(DemoTask.ARITHMETIC, {})["sampling"]["max_tokens"]
    assert (config.run.seed, config.training.steps, config.run.mode) == (7, 3, "colocated")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_point_has_its_time(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    main(0, tmp_path / "report.json", continuous=False, steps=1)
    document = json.loads((tmp_path / "report.json").read_text())
    (first_s, _), (last_s, _) = document["points"]
    assert first_s < last_s and document["steps"] == 1 and document["s_per_step"] > 0
