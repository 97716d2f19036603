from __future__ import annotations

import pytest

from echo_hub.tasks.options import TaskOptions
from echo_shared.errors import ConfigError


class Options(TaskOptions):
    size: int = 3


def test_options_are_read() -> None:
    assert Options.read("toy", {"size": 5}).size == 5
    assert Options.read("toy", {}).size == 3


@pytest.mark.parametrize("options", [{"size": "large"}, {"sise": 4}])
def test_a_wrong_option_is_named_with_the_valid_ones(options: dict[str, object]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as refused:
        Options.read("toy", options)
    assert f"task.options.{name} = {value!r}" in str(refused.value)
    assert "task toy" in str(refused.value) and "Its options are size." in str(refused.value)
