import echo_shared
from echo_node.releases import TAKES_OVER, newer_release, upgraded
from echo_shared.installation import how_to_upgrade


def test_a_hub_of_a_newer_release_is_a_reason_to_upgrade_and_no_other() -> None:
    said = newer_release("99.0")
    assert said.startswith("The hub runs release 99.0, this node ") and said.endswith(how_to_upgrade())
    assert newer_release(echo_shared.__version__) == newer_release("0.0.0") == newer_release("") == ""


def test_an_upgrade_on_the_disk_ends_the_process_that_is_refused() -> None:
    error = upgraded("99.0")
    assert upgraded("99.0", takes_over=True).code == TAKES_OVER != error.code
    assert error.code == "upgraded" and "99.0" in error.what and echo_shared.__version__ in error.what
