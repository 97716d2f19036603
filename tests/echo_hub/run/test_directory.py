from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hub.run.directory import RunDirectory
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, StorageError


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_directory_without_a_config_is_no_run(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=r"(?s)not a run directory.*no config\.toml.*echo-hub init"):
        run.check()
    run.config.mkdir()
    with pytest.raises(ConfigError):
        run.check()
    run.config.rmdir()
    run.config.write_text("")
    run.check()


def test_versions_are_whole_directories_in_order_of_their_number(run: RunDirectory) -> None:
    assert run.adapter_versions() == []
    for version in (2, 1, 10, 1_000_000):
        run.adapter(version).mkdir(parents=True)
    for other in (".unfinished-v000011", "v00001x", "v", "notes", "v-00003"):
        (run.root / "adapters" / other).mkdir()
    assert run.adapter_versions() == [1, 2, 10, 1_000_000]
    assert run.adapter(2) == run.root / "adapters" / "v000002"


def test_old_adapters_are_forgotten(run: RunDirectory) -> None:
    run.forget_adapters(kept=2, max_bytes=0, published_version=0, evaluating=())
    for version in range(1, 6):
        run.adapter(version).mkdir(parents=True)
        (run.adapter(version) / "adapter_config.json").write_text("{}")
    for published_version, evaluating, left in (
        (0, set(), [1, 2, 3, 4, 5]),
        (2, set(), [2, 3, 4, 5]),
        (5, {2, 9}, [2, 4, 5]),
        (5, set(), [4, 5]),
        (5, set(), [4, 5]),
    ):
        run.forget_adapters(kept=2, max_bytes=0, published_version=published_version, evaluating=evaluating)
        assert run.adapter_versions() == left, "unpublished and unevaluated adapters stay"
    assert len(list((run.root / "adapters").iterdir())) == 2


@pytest.mark.parametrize(("max_bytes", "left"), [(0, 6), (599, 5), (600, 6), (400, 4), (399, 3), (1, 3), (10_000, 6)])
def test_adapters_are_kept_as_far_as_their_bytes_go(run: RunDirectory, max_bytes: int, left: int) -> None:
    for version in range(1, 7):
        run.adapter(version).mkdir(parents=True)
        (run.adapter(version) / "adapter_config.json").write_bytes(bytes(10))
        (run.adapter(version) / "adapter_model.safetensors").write_bytes(bytes(90))
    run.forget_adapters(kept=200, max_bytes=max_bytes, published_version=6, evaluating=())
    assert run.adapter_versions() == list(range(1, 7))[-left:]


def test_an_adapter_that_cannot_be_deleted_is_tried_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2, 3):
        run.adapter(version).mkdir(parents=True)

    def busy(path: Path) -> None:
        raise PermissionError(f"{path} is open elsewhere")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        run.forget_adapters(kept=1, max_bytes=0, published_version=3, evaluating=())
    assert run.adapter_versions() == [3], "never half of one"
    assert caplog.text.count("is open elsewhere") == 2
    assert len(list((run.root / "adapters").iterdir())) == 3
    run.forget_adapters(kept=1, max_bytes=0, published_version=3, evaluating=())
    assert list((run.root / "adapters").iterdir()) == [run.adapter(3)]


@pytest.mark.parametrize("name", ["run", "run of May", "läuft#1", "C", "what?mode=ro", "100%41", "a+b&c=d@e"])
def test_the_database_lies_in_the_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    Store.open(RunDirectory(tmp_path / name).database_url).close()
    assert (tmp_path / name / "echo.db").is_file()


def test_the_database_is_the_same_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    relative = RunDirectory(Path("run"))
    assert relative.database_url == RunDirectory(tmp_path / "run").database_url


def test_one_hub_at_a_time(run: RunDirectory) -> None:
    with run.locked():
        with pytest.raises(StorageError, match=r"(?s)is using this run directory.*Stop that process"), run.locked():
            pytest.fail("two at once")
        script = f"from echo_hub.run.directory import *; RunDirectory(Path({str(run.root)!r})).locked().__enter__()"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert "is using this run directory" in other.stderr
    with run.locked():
        pass


def test_a_killed_hub_leaves_no_lock(run: RunDirectory) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom echo_hub.run.directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).locked():\n    print('locked', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as hub:
        assert hub.stdout is not None
        assert hub.stdout.readline() == "locked\n"
        with pytest.raises(StorageError), run.locked():
            pytest.fail("two at once")
        hub.kill()
        hub.wait()
        with run.locked():
            pass


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"), RunDirectory(tmp_path / "file").locked():
        pytest.fail("there is no such directory")


@pytest.mark.parametrize("error", [FileNotFoundError("a file of the base model"), TimeoutError("a peer")])
def test_an_error_under_the_lock_is_raised_and_frees_the_lock(run: RunDirectory, error: OSError) -> None:
    with pytest.raises(type(error)) as caught, run.locked():
        raise error
    assert caught.value is error
    with run.locked():
        pass
