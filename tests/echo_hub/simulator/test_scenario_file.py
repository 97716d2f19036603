"""A scenario's settings come from four sources. Errors name key, value and source, and the example file explains every
key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.scenario_file import load_scenario, render_scenario
from echo_shared.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_scenario(written(tmp_path, ""), {}) == Scenario() == load_scenario(None, {})


def test_the_example_gives_the_same_scenario_and_explains_every_setting(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path, "[nodes]\ncount = 7\n[lengths]\nratio = 30\n"), {})
    text = render_scenario(scenario)
    assert load_scenario(written(tmp_path, text), {}) == scenario
    lines = text.splitlines()
    for section in tomllib.loads(text).values():
        for name in section:
            at = next(number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
            assert lines[at - 1].startswith("# "), name


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_SIMULATED_NODES__COUNT", "20")
    monkeypatch.setenv("ECHO_SIMULATED_TRAINING__STEPS", "21")
    path = written(tmp_path, "[nodes]\ncount = 10\nwidth = 11\n[training]\nsteps = 12\n")
    scenario = load_scenario(path, {"training": {"steps": 32}})
    assert (scenario.nodes.count, scenario.nodes.width, scenario.training.steps) == (20, 11, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[nodes]\ncount = 0\n", ("nodes.count", "0", "line 2")),
        ("[nodes]\nwidht = 4\n", ("nodes.widht", "line 2", "did you mean width?")),
        ("[node]\ncount = 4\n", ("node", "line 1", "did you mean nodes?")),
        ("[lengths]\nratio = inf\n", ("lengths.ratio", "line 2")),
        ("[run]\nmode = 'nonsense'\n", ("run.mode", "'nonsense'", "line 2")),
        ("[training]\nsteps = 5\n", ("measuring.warm_up_steps must be less than training.steps",)),
        ("[training]\npublish_every = 4\n", ("training.publish_every must be at most training.max_staleness + 1",)),
        ("[run]\nmode = 'sequential'\n[training]\npublish_every = 2\n", ("training.publish_every must be 1",)),
        ("[nodes\n", ("not valid TOML",)),
    ],
)
def test_a_wrong_scenario_is_refused_by_name_and_place(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_scenario(written(tmp_path, text), {})
    assert [word for word in expected if word not in str(refused.value)] == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml", {})
