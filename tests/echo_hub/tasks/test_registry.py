import pytest

from echo_hub.tasks.registry import make_task
from echo_shared.errors import ConfigError


@pytest.mark.parametrize("name", ["arithmetic", "reasoning-gym:knights_knaves"])
def test_a_task_bears_the_name_it_was_asked_for(name: str) -> None:
    assert make_task(name, {}).name == name


@pytest.mark.parametrize("name", ["", "arithmetics", "arithmetic:hard", "knights_knaves", "reasoning_gym:chain_sum"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="no such task") as caught:
        make_task(name, {})
    assert "reasoning-gym:<dataset>" in str(caught.value)


@pytest.mark.parametrize("name", ["reasoning-gym", "reasoning-gym:"])
def test_a_dataset_must_be_named(name: str) -> None:
    with pytest.raises(ConfigError, match="no such reasoning-gym dataset"):
        make_task(name, {})
