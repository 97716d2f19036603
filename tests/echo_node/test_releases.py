import pytest

import echo_shared
from echo_node.releases import TAKES_OVER, is_newer, newer_release, upgraded
from echo_shared.installation import how_to_upgrade


def test_a_hub_of_a_newer_release_is_a_reason_to_upgrade_and_no_other() -> None:
    said = newer_release("99.0")
    assert said.startswith("The hub runs release 99.0, this node ") and said.endswith(how_to_upgrade())
    assert newer_release(echo_shared.__version__) == newer_release("0.0.0") == newer_release("") == ""


def test_an_upgrade_on_the_disk_ends_the_process_that_is_refused() -> None:
    error = upgraded("99.0")
    assert upgraded("99.0", takes_over=True).code == TAKES_OVER != error.code
    assert error.code == "upgraded" and "99.0" in error.what and echo_shared.__version__ in error.what


@pytest.mark.parametrize(
    ("theirs", "own"), [("0.10.0", "0.9.9"), ("1", "0.99"), ("2.0.1", "2.0"), ("0.0.1", "0"), ("1.2.dev3", "1.1")]
)
def test_the_later_release_is_newer_and_not_the_other_way_round(theirs: str, own: str) -> None:
    assert is_newer(theirs, own) and not is_newer(own, theirs)


@pytest.mark.parametrize("version", ["0.1.0", "1", "1.0", "\x1b[2J", ""])
def test_no_release_is_newer_than_itself_and_invalid_ones_are_never_newer(version: str) -> None:
    assert not is_newer(version, version) and not is_newer("", version) and not is_newer(version, "")
    assert not is_newer("1.0", "1") and not is_newer("1", "1.0.0")
