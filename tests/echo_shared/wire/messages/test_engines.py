import pytest

from echo_shared.wire.messages.engines import (
    PRECISIONS,
    known_precision,
    precision_in_words,
    precision_of_file,
    weights_of_file,
)


@pytest.mark.parametrize("weights", ["f32", "q4_1", "iq2_xxs", "mxfp4_moe"])
def test_an_engine_may_report_the_file_of_its_hub(weights: str) -> None:
    told = precision_of_file(weights, "3fa94c2e" + 24 * "0")
    assert told == f"{weights}@3fa94c2e" == known_precision(told)
    assert weights_of_file(told) == weights
    assert precision_in_words(told) == f"{weights} (the hub's file)"


@pytest.mark.parametrize("name", PRECISIONS)
def test_any_other_precision_is_of_no_file(name: str) -> None:
    assert known_precision(name) == name == precision_in_words(name)
    assert weights_of_file(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "q9_9",
        "q4_1@",
        "@3fa94c2e",
        "q4_1@3fa94c2",
        "q4_1@3FA94C2E",
        "Q4@3fa94c2e",
        "q4_1@3fa94c2e\n",
        "a" * 17 + "@3fa94c2e",
    ],
)
def test_an_unknown_precision_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown here"):
        known_precision(name)
