import pytest

from echo_shared.files.file_names import is_portable_name


@pytest.mark.parametrize("name", ["a", "a.json", "console", "com", "com10.x", ".hidden", "a b", "x" * 255, "\u00e4"])
def test_names_that_every_system_takes(name: str) -> None:
    assert is_portable_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", "c:", "a.", "a ", "CON", "nul.tar.gz", "COM1", "lpt9.x", "aux .x", "a\0", "x" * 256],
)
def test_names_that_some_system_does_not_take(name: str) -> None:
    assert not is_portable_name(name)
