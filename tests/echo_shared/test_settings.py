from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_shared.errors import ConfigError
from echo_shared.settings import line_of, load_settings, place_of


class Engine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1)] = 10
    tokens: tuple[Annotated[str, Field(min_length=3)], ...] = ()


class Settings(BaseSettings):
    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix="ECHO_TEST_", env_nested_delimiter="__")

    name: str = "default"
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _fits(self) -> "Settings":
        if self.name == "fast" and self.engine.steps > 5:
            raise ValueError('engine.steps must be at most 5 when name = "fast"')
        return self


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def test_defaults_hold_without_a_file() -> None:
    assert load_settings(Settings, None, {}) == Settings()


def test_each_source_overrides_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "name = 'file'\n[engine]\nsteps = 2\ntokens = ['from file']\n")
    assert load_settings(Settings, file, {}).engine == Engine(steps=2, tokens=("from file",))
    monkeypatch.setenv("ECHO_TEST_ENGINE__STEPS", "3")
    monkeypatch.setenv("ECHO_TEST_NAME", "environment")
    found = load_settings(Settings, file, {"name": "flag", "engine": {"steps": None}})
    assert (found.name, found.engine) == ("flag", Engine(steps=3, tokens=("from file",)))


def test_the_source_of_each_setting_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "name = 'file'\n[engine]\nsteps = 2\n")
    assert place_of(Settings, None, {}, ("name",)) == "default"
    assert place_of(Settings, file, {}, ("engine", "steps")) == f"{file}, line 3"
    assert place_of(Settings, file, {}, ("engine", "tokens")) == "default"
    monkeypatch.setenv("ECHO_TEST_ENGINE__STEPS", "3")
    assert place_of(Settings, file, {}, ("engine", "steps")) == "ECHO_TEST_ENGINE__STEPS"
    assert place_of(Settings, file, {"engine": {"steps": 4}}, ("engine", "steps")) == "command line"
    assert place_of(Settings, file, {"name": None}, ("name",)) == f"{file}, line 1"


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("[engine]\n\nsteps = 0\n", ["line 3: engine.steps = 0"]),
        ("engine.steps = 'x'\n", ["line 1: engine.steps = 'x'"]),
        ("[engine]\ntokens = [\n  'long',\n  'x',\n]\n", ["line 2: engine.tokens.1 = 'x'"]),
        ("[engine]\nstep = 3\n", ["line 2: there is no setting engine.step; did you mean steps?"]),
        ("[motor]\nsteps = 3\n", ["line 1: there is no setting motor"]),
        ("name = 'fast'\n", ['engine.steps must be at most 5 when name = "fast"']),
        ("name = 3\n[engine]\nsteps = -1\n", ["2 settings", "line 1: name = 3", "line 3: engine.steps = -1"]),
        ("engine = 5\n", ["line 1: engine = 5"]),
    ],
)
def test_a_wrong_file_names_key_and_line(tmp_path: Path, text: str, complaints: list[str]) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(Settings, file, {})
    for complaint in [*complaints, str(file)]:
        assert complaint in str(caught.value)


def test_an_unknown_setting_is_named_with_the_right_one(tmp_path: Path) -> None:
    file = written(tmp_path, "[engine]\nstep = 3\n")
    with pytest.raises(ConfigError, match=r"line 2: there is no setting engine\.step; it is engine\.steps now"):
        load_settings(Settings, file, {}, instead={"engine.step": "it is engine.steps now"})


def test_a_wrong_variable_or_flag_is_named_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "[engine]\nsteps = 2\n")
    monkeypatch.setenv("ECHO_TEST_ENGINE__STEPS", "zero")
    with pytest.raises(ConfigError, match=r"ECHO_TEST_ENGINE__STEPS: engine\.steps = 'zero'"):
        load_settings(Settings, file, {})
    with pytest.raises(ConfigError, match=r"command line: engine\.steps = -5"):
        load_settings(Settings, file, {"engine": {"steps": -5}})


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("ECHO_TEST_ENGNE__STEPS", "; did you mean ECHO_TEST_ENGINE__STEPS?"),
        ("ECHO_TEST_ENGINE_STEPS", "; did you mean ECHO_TEST_ENGINE__STEPS?"),
        ("ECHO_TEST__ENGINE__STEPS", "; did you mean ECHO_TEST_ENGINE__STEPS?"),
        ("ECHO_TEST_NAM", "; did you mean ECHO_TEST_NAME?"),
        ("ECHO_TEST_", ""),
        ("ECHO_TEST_PORT_8710_TCP", ""),
    ],
)
def test_a_variable_that_sets_nothing_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
) -> None:
    monkeypatch.setenv(variable, "5")
    with pytest.raises(ConfigError) as caught:
        load_settings(Settings, None, {})
    assert caught.value.got == f"{variable}{hint}"


def test_all_variables_that_set_nothing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ECHO_TEST_ENGNE__STEPS", "ECHO_TEST_HOME", "ECHO_TEST_NAM"):
        monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigError, match="2 environment variables") as caught:
        load_settings(Settings, None, {}, other_variables=("ECHO_TEST_HOME",))
    assert "ENGNE" in (caught.value.got or "") and "NAM" in (caught.value.got or "")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ECHO_TEST_ENGINE", '{"steps": 7}'), ("echo_test_engine__steps", "7"), ("Echo_Test_Engine__Steps", "7")],
)
def test_a_setting_has_several_spellings_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert load_settings(Settings, None, {}).engine.steps == 7


def test_a_variable_of_an_unknown_key_in_a_section_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_TEST_ENGINE__STEP", "5")
    with pytest.raises(ConfigError, match=r"ECHO_TEST_ENGINE__STEP: there is no setting engine\.step; did you mean"):
        load_settings(Settings, None, {})


def test_a_variable_that_should_be_json_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_TEST_ENGINE__TOKENS", "plain")
    with pytest.raises(ConfigError):
        load_settings(Settings, None, {})


@pytest.mark.parametrize("content", [b"steps = = 1\n", b"[a\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_invalid_toml_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        load_settings(Settings, file, {})


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(Settings, tmp_path / "none.toml", {})


TEXT = '''# first
[a]
x = """
y = 1
"""
y = 2  # the real one

[b.c]
z = {w = 1, v = 2}
[[d]]
k = 1
[[d]]
k = 2
'''


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("a",), 2),
        (("a", "x"), 3),
        (("a", "y"), 6),
        (("b", "c", "z", "v"), 9),
        (("b", "c", "nothing"), 8),
        (("d", 1, "k"), 13),
        (("e",), None),
        ((), None),
    ],
)
def test_lines_are_found_in_any_syntax(location: tuple[str | int, ...], line: int | None) -> None:
    assert line_of(TEXT, location) == line


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_line_is_where_the_key_stands(before: int, between: int) -> None:
    text = "# c\n" * before + "[s]\n" + "\n" * between + "key = 1\n"
    assert line_of(text, ("s", "key")) == before + between + 2


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "text",
    ["name = 'file'", "\nname = 'file'", "# ½\nname = 'file'", "name = 'file' # end\r\n", "name = 'file'\n[engine]\n"],
)
def test_a_byte_order_mark_is_ignored(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(MARK + text.encode())
    assert load_settings(Settings, file, {}).name == "file"
    line = 1 + text[: text.index("name")].count("\n")
    assert place_of(Settings, file, {}, ("name",)) == f"{file}, line {line}"
    file.write_bytes(MARK + text.encode() + b"\n[motor]")
    with pytest.raises(ConfigError, match=r"line \d: there is no setting motor"):
        load_settings(Settings, file, {})


@pytest.mark.parametrize(
    "content",
    [
        "name = 'file'".encode("utf-16"),
        b"\xff",
        b"name = '\xed\xa0\xbd'",
        b'name = "\\ud83d"',
        b"name = " + b"[" * 100_000,
        b"name = " + b"{a = " * 100_000,
        b"name = " + b"9" * 10_000,
        b"name = 'a'\nname = 'b'",
    ],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(Settings, file, {})
    assert str(file) in str(caught.value) and caught.value.do
