import inspect

from echo_shared import errors
from echo_shared.errors import EchoError

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EchoError)]


def test_every_error_has_its_own_code() -> None:
    assert len({kind.default_code for kind in TREE}) == len(TREE)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for kind in TREE:
        assert kind.__name__ in errors.__doc__


def test_the_text_holds_the_problem_the_value_and_the_remedy() -> None:
    assert str(EchoError("It broke.", got="this", do="That.")) == "It broke.\n  got: this\n  do:  That."
    assert str(EchoError("It broke.")) == "It broke."


def test_the_brief_text_leaves_the_advice_out() -> None:
    assert EchoError("It broke.", got="this", do="That.").brief == "It broke. (this)"
    assert EchoError("It broke.", do="That.").brief == "It broke."


def test_a_code_can_be_given() -> None:
    assert EchoError("x").code == "error"
    assert EchoError("x", code="special").code == "special"
