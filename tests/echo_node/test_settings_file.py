from __future__ import annotations

import stat
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from echo_node.config import NodeConfig, load_config
from echo_node.host.hardware import Gpu
from echo_node.settings_file import SettingsFile, allowed, keys_of, value_of
from echo_shared.errors import ConfigError, StorageError

WRITTEN = """\
# Mine.
name = 'den'   # in the cellar
width = 8

[manners]  # for Anna
# She draws.
exclusive = ["blender"]
idle_after_s = 60
"""


@pytest.fixture
def file(tmp_path: Path) -> SettingsFile:
    return SettingsFile(tmp_path / "settings" / "config.toml", {})


def test_every_setting_has_a_meaning_and_bounds_in_words() -> None:
    keys = list(keys_of())
    assert {"width", "manners.idle_after_s", "helpers"} <= set(keys)
    assert all(allowed(key) for key in keys)
    found = SettingsFile(Path("none"), {}).all()
    assert [setting.key for setting in found] == keys
    assert all(setting.meaning.endswith((".", ";")) and setting.where == "default" for setting in found)
    assert allowed("manners.gpu") == "one of idle, always"
    assert allowed("width") == "a whole number, at least 0, at most 1024"


def test_a_change_keeps_comments_order_and_all_other_text(file: SettingsFile) -> None:
    file.path.parent.mkdir()
    file.path.write_text(WRITTEN)
    assert file.set("width", ["4"]) == 4
    assert file.set("name", ["the den"]) == "the den"
    assert file.set("manners.idle_after_s", ["90"]) == 90.0
    assert file.set("threads", ["2"]) == 2
    changed = WRITTEN.replace("'den'", '"the den"').replace("= 8\n", "= 4\nthreads = 2\n").replace("= 60", "= 90.0")
    assert file.path.read_text() == changed
    config = load_config(file.path, {})
    assert (config.width, config.threads, config.manners.exclusive) == (4, 2, ("blender",))
    assert file.unset("threads") and not file.unset("threads")
    assert file.path.read_text() == changed.replace("threads = 2\n", "")


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("manners.exclusive", ["blender", "obs studio"], ("blender", "obs studio")),
        ("manners.schedule", ['["mon-fri 22:00-07:00"]'], ("mon-fri 22:00-07:00",)),
        ("manners.schedule", ["[]"], ()),
        ("manners.on_battery", ["true"], True),
        ("manners.cpu_share", ["0.5"], 0.5),
        ("backend", ["auto"], "auto"),
        ("name", ["007"], "007"),
    ],
)
def test_the_node_reads_the_typed_value(file: SettingsFile, key: str, values: list[str], expected: object) -> None:
    file.set(key, values)
    assert value_of(load_config(file.path, {}), key) == expected
    assert file.one(key).where == f"{file.path}, line {2 if '.' in key else 1}"


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("width", ["wide"], ["width is not changed", "'wide'", "a whole number, at least 0, at most 1024"]),
        ("width", ["2", "3"], ["width takes one value", "2 3"]),
        ("width", ["-1"], ["width = '-1'", "at least 0"]),
        ("precision", ["f8"], ["'f8'", "one of auto, f32"]),
        ("manners.schedule", ["monday"], ["manners.schedule is not changed", "'monday'"]),
        ("manners.schedule", ["["], ["not a list"]),
        ("idle_after_s", ["3"], ["no such setting", "Did you mean manners.idle_after_s?"]),
        ("widht", ["3"], ["no such setting", "Did you mean width?"]),
        ("manners", ["3"], ["no such setting"]),
        ("backend", ["vllm"], ["backend is not changed", "vllm"]),
    ],
)
def test_nothing_is_written_that_the_node_would_refuse(
    file: SettingsFile, key: str, values: list[str], words: list[str]
) -> None:
    if key == "backend" and find_spec("vllm") is not None:
        pytest.skip("vLLM runs here")
    with pytest.raises(ConfigError) as caught:
        file.set(key, values)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert not file.path.exists()


def test_devices_are_checked_before_they_are_written(file: SettingsFile, fake_gpus: dict[str, Gpu]) -> None:
    assert file.set("devices", ["cuda:0", "cuda:1"]) == ["cuda:0", "cuda:1"]
    del fake_gpus["cuda:1"]
    for values, words in ((["cuda:1"], "cuda:1 is not here"), (["cpu", "cuda:0"], "one kind of device")):
        with pytest.raises(ConfigError, match=f"devices is not changed: .*{words}"):
            file.set("devices", values)
    assert value_of(load_config(file.path, {}), "devices") == ("cuda:0", "cuda:1")
    file.path.write_text('devices = "cuda:0"')
    assert value_of(load_config(file.path, {}), "devices") == ("cuda:0",)
    with pytest.raises(ConfigError, match="has one engine, which chooses its own device"):
        load_config(file.path, {"helpers": ["127.0.0.1:1"]})


def test_settings_that_do_not_go_together_are_refused(file: SettingsFile) -> None:
    file.set("helpers", ["127.0.0.1:1"])
    before = file.path.read_text()
    with pytest.raises(ConfigError, match=r"backend is not changed: only llama\.cpp spreads"):
        file.set("backend", ["torch"])
    assert file.path.read_text() == before


def test_a_setting_that_others_need_is_not_removed(file: SettingsFile) -> None:
    for key, value in (("manners.max_gpu_celsius", "105"), ("manners.target_gpu_celsius", "95")):
        file.set(key, [value])
    written = file.path.read_bytes()
    with pytest.raises(ConfigError, match=r"max_gpu_celsius is not changed: .*must be below manners.max_gpu_celsius"):
        file.unset("manners.max_gpu_celsius")
    assert file.path.read_bytes() == written
    assert file.unset("manners.target_gpu_celsius") and file.unset("manners.max_gpu_celsius")
    file.path.write_text("no_setting = 1\nwidth = 4\n")
    assert file.unset("width"), "other mistakes in the file are not in the way"


def test_the_source_of_a_setting_is_reported(file: SettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.set("width", ["4"])
    file.set("threads", ["2"])
    file.set("name", ["n"])
    monkeypatch.setenv("ECHO_NODE_THREADS", "3")
    monkeypatch.setenv("ECHO_NODE_MANNERS__GPU", "always")
    joined = SettingsFile(file.path, {"name": "joined"})
    found = {setting.key: (setting.value, setting.where) for setting in joined.all() if setting.where != "default"}
    assert found == {
        "width": (4, f"{file.path}, line 1"),
        "threads": (3, "ECHO_NODE_THREADS"),
        "name": ("joined", "join"),
        "manners.gpu": ("always", "ECHO_NODE_MANNERS__GPU"),
    }
    assert joined.one("width").default == NodeConfig.model_fields["width"].default


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes and links")
def test_only_the_owner_can_read_the_file_and_a_link_stays_a_link(file: SettingsFile, tmp_path: Path) -> None:
    elsewhere = tmp_path / "dotfiles.toml"
    elsewhere.write_text("width = 3\n")
    file.path.parent.mkdir()
    file.path.symlink_to(elsewhere)
    file.set("width", ["5"])
    assert file.path.is_symlink() and elsewhere.read_text() == "width = 5\n"
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["dotfiles.toml"]


def test_a_file_that_is_no_toml_is_left_alone(file: SettingsFile) -> None:
    file.path.parent.mkdir()
    file.path.write_text("width = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        file.set("width", ["4"])
    assert file.path.read_text() == "width = \n"


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        SettingsFile(tmp_path / "file" / "config.toml", {}).set("width", ["4"])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("width = 3\n", "width = 5\n"),
        ("# ½\nwidth = 3\n", "# ½\nwidth = 5\n"),
        ("[manners]\nidle_after_s = 7\n", "width = 5\n\n[manners]\nidle_after_s = 7\n"),
        ("name = 'a'\n", "name = 'a'\nwidth = 5\n"),
        ("", "width = 5\n"),
    ],
)
def test_a_byte_order_mark_is_ignored(file: SettingsFile, text: str, written: str) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    file.set("width", ["5"])
    assert file.one("width").value == 5
    assert file.path.read_bytes().decode() == written
