"""Settings come from four sources. Errors name key, value and source, and the written file explains every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from echo_hub.config.file import GONE, MOVED, load_config, render_config, set_in_file
from echo_hub.config.sections import HubConfig, RunConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.config.task_sections import TaskConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_shared.described import Described
from echo_shared.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str, overrides: Mapping[str, Any] = {}) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), overrides)
    return caught.value


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, ""), {}) == HubConfig() == load_config(None, {})


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_HUB_TRAINING__GROUP_SIZE", "20")
    monkeypatch.setenv("ECHO_HUB_TRAINING__STEPS", "21")
    path = written(tmp_path, "[training]\nlora_rank = 10\ngroup_size = 11\nsteps = 12\n")
    training = load_config(path, {"training": {"steps": 32, "lora_rank": None}}).training
    assert (training.lora_rank, training.group_size, training.steps) == (10, 20, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[run]\nname = 'a'\n\n[training]\nsteps = -3\n", ("training.steps", "-3", "line 5")),
        ("[training]\n# ten\nstepz = 10\n", ("training.stepz", "line 3", "did you mean steps?")),
        ("[trainig]\nsteps = 10\n", ("trainig", "line 1", "did you mean training?")),
        ("[server]\nport = 'http'\n", ("server.port", "'http'", "line 2")),
        ("[run]\nmode = 'fast'\n", ("run.mode", "'fast'", "line 2", "'async'")),
        ("[learner]\ndevice = 'gpu'\n", ("learner.device", "'gpu'", "line 2")),
        ("[learner]\naddress = 'here'\n", ("learner.address", "'here'", "line 2")),
        ("[task.template_options]\ntools = []\n", ("task.template_options", "tools is set by the hub")),
        ("[sampling]\nstop = ['']\n", ("sampling.stop",)),
        ("[training]\ndiscount = 0.9\n", ('discount needs credit = "turn"',)),
        (
            "[training]\ncredit = 'turn'\n[objective]\nselection = 'shuffle_r1'\n",
            ('objective.selection must be "all"',),
        ),
        ("[objective]\nshuffle_batches = 8\n", ("objective", 'needs selection = "shuffle_r1"')),
        (
            "[training]\nupdates_per_step = 4\n[objective]\nselection = 'shuffle_r1'\nshuffle_batches = 6\n",
            ("objective.shuffle_batches must be a multiple of training.updates_per_step", "got 6 and 4"),
        ),
        ("[learner]\nhosts = 2\n", ("learner.address must be HOST:PORT",)),
        ("[learner]\nprocesses = 2\ndevice = 'cuda:1'\n", ("learner.device", "a separate GPU")),
        ("[dissemination]\nway = 'pigeon'\n", ("dissemination.way", "'pigeon'", "line 2", "'broadcast'")),
        ("[dissemination]\ndelta_reach = 8\n", ("dissemination.delta_reach", "line 2")),
        ("[dissemination]\nbase = 'model_hub'\n", ('dissemination.base must be "swarm"', "built in")),
        ("[server]\npublic_url = 'hub.example.org'\n", ("server.public_url", "'hub.example.org'", "line 2")),
        ("[training]\nsteps = = 3\n", ("not valid TOML", "line 2")),
        ("\x00", ("not valid TOML", "line 1")),
        ("[run]\nname = 'a'\n[run]\nname = 'b'\n", ("not valid TOML", "line 3")),
    ],
)
def test_a_corrupt_file_is_named_with_key_value_and_line(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    message = str(refusal(tmp_path, text))
    assert str(tmp_path / "config.toml") in message
    assert [part for part in (*expected, "do:") if part not in message] == []


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    message = str(refusal(tmp_path, "[training]\nsteps = 0\n[sampling]\ntemperature = nan\n"))
    assert "training.steps" in message
    assert "sampling.temperature" in message


def test_a_wrong_variable_or_flag_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "command line: server.port = 70000" in str(refusal(tmp_path, "", {"server": {"port": 70_000}}))
    monkeypatch.setenv("ECHO_HUB_TRAINING__STEPS", "many")
    assert "ECHO_HUB_TRAINING__STEPS: training.steps = 'many'" in str(refusal(tmp_path, "[training]\nsteps = 3\n"))


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ECHO_HUB_TRAINNG__STEPS", "ECHO_HUB_TRAINING__STEPS"),
        ("ECHO_HUB_TRAINING_STEPS", "ECHO_HUB_TRAINING__STEPS"),
        ("ECHO_HUB_STEPS", "ECHO_HUB_TRAINING__STEPS"),
        ("ECHO_HUB_TRAINING__STEPS__X", "ECHO_HUB_TRAINING__STEPS"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "5")
    with pytest.raises(ConfigError, match=f"{variable}; did you mean {meant}"):
        load_config(None, {})


def test_a_tasks_own_options_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_HUB_TASK__OPTIONS__DIGITS", "3")
    assert load_config(None, {}).task.options == {"digits": "3"}


@pytest.mark.parametrize(("name", "places"), MOVED.items())
def test_a_moved_setting_is_named_with_its_new_place(tmp_path: Path, name: str, places: str) -> None:
    section, key = name.split(".")
    message = str(refusal(tmp_path, f"[{section}]\n{key} = 1\n"))
    assert f"line 2: there is no setting {name}; it is {places} now" in message
    known = {known for known, _ in all_fields(HubConfig)}
    assert name not in known and set(places.split(" and ")) <= known


@pytest.mark.parametrize(("name", "instead"), GONE.items())
def test_a_removed_setting_is_named_with_its_replacement(tmp_path: Path, name: str, instead: str) -> None:
    section, key = name.split(".")
    message = str(refusal(tmp_path, f"[{section}]\n{key} = 1\n"))
    assert f"line 2: there is no setting {name}; {instead}" in message
    known = {known for known, _ in all_fields(HubConfig)}
    assert name not in known and set(re.findall(r"\balerts\.\w+", instead)) <= known
    assert all((Path(__file__).parents[3] / path).exists() for path in re.findall(r"installers/[\w./]+\w", instead))


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("[run]\nmode = 'sequential'\n[training]\npublish_every = 2\n", ("training.publish_every", "run.mode")),
        (
            "[run]\nmode = 'sequential'\n[training]\non_new_version = 'interrupt'\n",
            ("training.on_new_version", "run.mode", '"finish"'),
        ),
        (
            "[run]\nmode = 'colocated'\n[training]\non_new_version = 'interrupt'\n",
            ("training.on_new_version", "run.mode", '"finish"'),
        ),
        ("[training]\non_new_version = 'maybe'\n", ("training.on_new_version", "'finish' or 'interrupt'")),
        ("[run]\nmode = 'colocated'\n[evaluation]\nby = 'nodes'\n", ("evaluation.by", "run.mode")),
        ("[training]\nmax_staleness = 1\npublish_every = 3\n", ("training.publish_every", "training.max_staleness")),
        ("[cost]\nelectricity_per_kwh = 0.3\n", ("cost.spend_cap_per_hour", "cost.electricity_per_kwh")),
        (
            "[objective]\noverlong = 'penalty'\noverlong_buffer_tokens = 17\n",
            ("objective.overlong_buffer_tokens", "sampling.max_tokens"),
        ),
        (
            "[training]\ntokens_per_step = 9\n[objective]\naggregation = 'token_mean'\n",
            ("objective.aggregation", "training.tokens_per_step"),
        ),
        ("[objective]\nname = 'grpo'\ncap = 3\n", ("objective", "grpo does not use cap", "line 1")),
        ("[objective]\nname = 'two_sided'\ncap = 1.1\n", ("objective", "cap > 1 + clip_high", "line 1")),
    ],
)
def test_settings_that_do_not_fit_together_name_each_other(tmp_path: Path, text: str, keys: tuple[str, ...]) -> None:
    message = str(refusal(tmp_path, text))
    assert [key for key in keys if key not in message] == []


def all_fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str | None]]:
    fields: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields += [(prefix + name, field.annotation.__doc__), *all_fields(field.annotation, f"{prefix}{name}.")]
        else:
            assert issubclass(model, Described)
            fields.append((prefix + name, model.descriptions().get(name)))
    return fields


def test_every_setting_is_documented() -> None:
    assert [name for name, description in all_fields(HubConfig) if not description] == []


def test_the_written_file_holds_every_setting_under_its_comment() -> None:
    text = render_config(HubConfig())
    values = tomllib.loads(text)
    names = {f"{section}.{key}" for section, keys in values.items() for key in keys} | set(values)
    assert names == {name for name, _ in all_fields(HubConfig)}
    assert "# Steps of the whole run; each turns a policy version into the next. (at least 1)\nsteps = 60\n" in text
    assert max(len(line) for line in text.splitlines()) <= 110


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OPTIONS = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    name=TEXT.filter(bool),
    options=st.dictionaries(TEXT, OPTIONS, max_size=3),
    tokens=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=8, max_size=20), min_size=1, max_size=3),
    learning_rate=st.floats(min_value=1e-30, max_value=1e30),
)
def test_written_settings_are_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    options: dict[str, Any],
    tokens: list[str],
    learning_rate: float,
) -> None:
    config = HubConfig(
        run=RunConfig(name=name, mode="sequential"),
        task=TaskConfig(options=options),
        training=TrainingConfig(learning_rate=learning_rate),
        server=ServerConfig(join="invite", invite_tokens=tuple(tokens)),
    )
    assert load_config(written(tmp_path_factory.mktemp("run"), render_config(config)), {}) == config


def test_a_value_that_toml_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        render_config(HubConfig(task=TaskConfig(options={"limit": None})))


def test_setting_one_key_in_the_file_changes_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path, render_config(HubConfig()))
    before = path.read_text(encoding="utf-8")
    value = 'a "quoted"\\path'
    set_in_file(path, "model", "start_from", value)
    assert load_config(path, {}).model.start_from == value
    changed = [
        pair for pair in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if len({*pair}) > 1
    ]
    assert [old for old, _ in changed] == ['start_from = ""']


@pytest.mark.parametrize("text", ["", "[run]\nseed = 1\n", "[model]\n[run]\nseed = 1\n", '[model]\nbase = "x"'])
def test_a_setting_that_the_file_does_not_have_is_added(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    set_in_file(path, "model", "start_from", "here")
    config = load_config(path, {})
    assert config.model.start_from == "here"
    assert config.run.seed == ("seed" in text) and (config.model.base == "x") == ("base" in text)


def test_a_setting_that_no_line_sets_is_left_to_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, 'model = {base = "x"}\n')
    with pytest.raises(ConfigError, match=r'(?s)by hand: start_from = "here" in \[model\]'):
        set_in_file(path, "model", "start_from", "here")
    assert path.read_text(encoding="utf-8") == 'model = {base = "x"}\n'
    monkeypatch.setenv("ECHO_HUB_MODEL__START_FROM", "there")
    with pytest.raises(ConfigError, match=r"(?s)'there', by the environment.*Unset ECHO_HUB_MODEL__START_FROM"):
        set_in_file(written(tmp_path, ""), "model", "start_from", "here")


def test_a_setting_is_set_in_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\nbase = 'builtin:small'\n")
    set_in_file(path, "model", "base", "builtin:tiny")
    assert path.read_bytes() == b'[model]\nbase = "builtin:tiny"\n'
