import pytest

from echo_node.core.releases import is_newer


@pytest.mark.parametrize(
    ("theirs", "own"), [("0.10.0", "0.9.9"), ("1", "0.99"), ("2.0.1", "2.0"), ("0.0.1", "0"), ("1.2.dev3", "1.1")]
)
def test_the_later_release_is_newer_and_not_the_other_way_round(theirs: str, own: str) -> None:
    assert is_newer(theirs, own) and not is_newer(own, theirs)


@pytest.mark.parametrize("version", ["0.1.0", "1", "1.0", "\x1b[2J", ""])
def test_no_release_is_newer_than_itself_and_invalid_ones_are_never_newer(version: str) -> None:
    assert not is_newer(version, version) and not is_newer("", version) and not is_newer(version, "")
    assert not is_newer("1.0", "1") and not is_newer("1", "1.0.0")
