import subprocess
import sys
from pathlib import Path

import pytest

from echo_node.host.paths import NodePaths
from echo_shared.errors import StorageError
from tests.homeless import run_homeless


def test_the_flag_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    assert NodePaths.find(None).data_dir == tmp_path / "home"
    assert NodePaths.find(tmp_path / "flag").data_dir == tmp_path / "flag"
    assert NodePaths.find(tmp_path / "flag").config_file == tmp_path / "home" / "config.toml"


def test_without_a_setting_the_platform_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO_NODE_HOME", raising=False)
    paths = NodePaths.find(None)
    assert paths.data_dir.is_absolute() and "echo-node" in str(paths.data_dir)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces")
def test_a_user_without_a_home_is_asked_for_a_directory(tmp_path: Path) -> None:
    said = run_homeless("-m", "echo_node", "status")
    assert said.returncode == 1 and "Traceback" not in said.stderr
    assert "no home directory" in said.stderr and "--data-dir DIR" in said.stderr
    code = f"import pathlib, echo_node.host.paths as p; print(p.NodePaths.find(pathlib.Path({str(tmp_path)!r})))"
    found = run_homeless("-c", code)
    assert f"config_file=PosixPath('{tmp_path}/config.toml')" in found.stdout, found.stderr
    installed = run_homeless("-m", "echo_node", "service", "install", "--data-dir", str(tmp_path))
    assert installed.returncode == 1 and "Traceback" not in installed.stderr


def test_two_hubs_have_two_directories(tmp_path: Path) -> None:
    paths = NodePaths.find(tmp_path)
    assert paths.hub(b"a" * 32) != paths.hub(b"b" * 32)


def test_another_process_cannot_have_the_directory(tmp_path: Path) -> None:
    paths = NodePaths.find(tmp_path)
    script = (
        "import sys; from pathlib import Path; from echo_node.host.paths import NodePaths\n"
        "with NodePaths.find(Path(sys.argv[1])).lock(): pass"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with paths.lock():
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 1 and "A node already runs on this data directory." in second.stderr
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_place_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"), NodePaths.find(tmp_path / "file" / "below").lock():
        pass
