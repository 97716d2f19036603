"""Options of verifiers environments."""

from __future__ import annotations

import pytest

from echo_hub.sessions.adapters.verifiers import VerifiersOptions
from echo_shared.errors import ConfigError


def test_keys_with_dots_are_put_into_the_section_of_verifiers() -> None:
    given = {"env": {"agent": {"model": "x"}}, "env.agent.harness.id": "bash", "env.taskset.num_tasks": 3}
    assert VerifiersOptions.read("verifiers:demo", given).env == {
        "agent": {"model": "x", "harness": {"id": "bash"}},
        "taskset": {"num_tasks": 3},
    }
    assert given["env"] == {"agent": {"model": "x"}}, "the settings themselves are not changed"


def test_the_bounds_are_known_before_the_process_runs() -> None:
    declared = VerifiersOptions.read("verifiers:demo", {"bounds": [-1, 2]}).declared
    assert (declared["reward_bounds"], declared["reward_if_lost"]) == ((-1.0, 2.0), -1.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"harnes": "null"}, r"task.options.harnes = 'null'"), ({"bounds": [1, 1]}, "the lower one first")],
)
def test_invalid_options_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        VerifiersOptions.read("verifiers:demo", options)
    assert why in str(raised.value)
