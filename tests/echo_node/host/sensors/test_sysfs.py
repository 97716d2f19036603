from pathlib import Path

from echo_node.host.sensors.sysfs import text_of


def test_an_unreadable_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b" \xff12 \n")
    assert text_of(tmp_path / "file").endswith("12")
    assert text_of(tmp_path / "none") == "" == text_of(tmp_path)
