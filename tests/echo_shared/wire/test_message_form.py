from typing import Annotated, Any, get_args

import pytest
from pydantic import Field

from echo_shared.errors import LocalProtocolError
from echo_shared.wire.message_form import Form, ListForm, MapForm, form_of
from echo_shared.wire.messages import FromHub, FromNode, Lease, Receipts, WireMessage
from echo_shared.wire.messages.fields import PackedArray, TokenIds

KINDS = (*get_args(FromHub), *get_args(FromNode))
ARRAY = MapForm({"dtype": None, "shape": ListForm(None, 1), "data": None})


def test_a_list_of_maps_has_the_bound_of_its_field() -> None:
    form = form_of(Receipts).fields["receipts"]
    assert isinstance(form, ListForm) and form.most == 4_096
    assert isinstance(form.item, MapForm) and form.item.fields["rollout_id"] is None


def test_arrays_lists_and_maps_that_may_be_missing_have_a_form() -> None:
    fields = form_of(Lease).fields
    assert fields["prompt_ids"] == ARRAY and fields["seed"] is None
    assert isinstance(fields["offer"], MapForm) and fields["offer"].fields["peers"] == ListForm(ListForm(None, 2), 64)


def arrays_in(form: Form) -> int:
    if isinstance(form, MapForm):
        return 1 if form == ARRAY else sum(map(arrays_in, form.fields.values()))
    return arrays_in(form.item) if isinstance(form, ListForm) else 0


def array_fields(kind: type[WireMessage]) -> list[str]:
    """Return the fields declared as arrays in the class, without its JSON Schema."""
    return [
        name for name, field in kind.model_fields.items() if any(isinstance(m, PackedArray) for m in field.metadata)
    ]


def all_messages(kind: type[WireMessage]) -> list[type[WireMessage]]:
    return [kind, *(below for one in kind.__subclasses__() for below in all_messages(one))]


def test_each_array_field_has_the_form_of_an_array() -> None:
    fields = [(kind, name) for kind in all_messages(WireMessage)[1:] for name in array_fields(kind)]
    assert len({(kind.__name__, name) for kind, name in fields}) >= 11
    assert [(kind, name) for kind, name in fields if form_of(kind).fields[name] != ARRAY] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_message_has_a_form(kind: type[WireMessage]) -> None:
    assert form_of(kind).fields.keys() == kind.model_fields.keys()


def test_an_optional_array_counts_as_an_array() -> None:
    class Odd(WireMessage):
        ids: TokenIds | None = None

    assert form_of(Odd).fields["ids"] == ARRAY


@pytest.mark.parametrize(
    "annotation",
    [Any, tuple[int, ...], dict[str, int], Annotated[tuple[int, ...], Field(max_length=3)] | Lease],
    ids=["anything", "without_bound", "any_keys", "list_or_map"],
)
def test_a_field_without_a_known_form_is_an_error(annotation: Any) -> None:
    class Odd(WireMessage):
        field: annotation

    with pytest.raises(LocalProtocolError, match="schema of a message"):
        form_of(Odd)
