from __future__ import annotations

import pytest

from echo_hub.tenants.paths import WeightsPath
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import WeightsKind


def test_a_path_is_read_as_it_was_made() -> None:
    path = WeightsPath.make("s-1:train:0", WeightsKind.SAMPLER, "000100")
    assert str(path) == "tinker://s-1:train:0/sampler_weights/000100"
    assert WeightsPath.parse(str(path)) == path


@pytest.mark.parametrize(
    "text", ["", "a/weights/b", "tinker://a/b", "tinker://a/other/b", "tinker://a/weights/b/c", "tinker://a/weights/ü"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(Refusal, match="not a path"):
        WeightsPath.parse(text)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 129])
def test_names_that_cannot_stand_in_a_path_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match="name of weights"):
        WeightsPath.make("m", WeightsKind.TRAINING, name)
