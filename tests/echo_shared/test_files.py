import stat
import sys
from pathlib import Path

from echo_shared.files import write_private


def test_private_files_are_replaced_whole_and_nobody_else_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "dir" / "secret.json"
    write_private(file, b"one\n")
    write_private(file, b"two\n")
    assert file.read_bytes() == b"two\n"
    assert [path.name for path in file.parent.iterdir()] == ["secret.json"]
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
