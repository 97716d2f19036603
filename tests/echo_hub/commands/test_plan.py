from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from echo_hub.commands.plan import EXAMPLE, changed, fleet_of_file, fleet_of_run, make_plan, write_json
from echo_hub.commands.plan_text import plan_lines
from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from tests.echo_hub.written_books import write_books


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(EXAMPLE)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()


def test_the_example_is_a_fleet(example: Path) -> None:
    fleet = fleet_of_file(example)
    assert fleet.workload == Workload(
        mode="async", rollouts_per_step=512, train_s=20, hand_off_s=0.5, broadcast_s=6, max_staleness=2
    )
    laptop, rented = fleet.kinds
    assert laptop == NodeClass(name="laptop", count=20, rollouts_per_s=0.6, latency_s=14.0)
    assert (rented.name, rented.cost_per_h) == ("rented GPU", 0.45)
    assert fleet.nodes == fleet.kinds


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("rollouts_per_step = 5\n", "train_s: Field required"),
        ("rollouts_per_step = 5\ntrain_s = -1\n", "train_s: Input should be greater than 0"),
        ("rollouts_per_step = 5\ntrain_s = 1\nspeed = 3\n", "speed: Extra inputs"),
        ("[[nodes]]\nname = 'a'\ncount = 1\n", "rollouts_per_step: Field required"),
        ("rollouts_per_step = 5\ntrain_s = nan\n", "train_s"),
        ("rollouts_per_step = ", "Invalid value"),
        (
            "rollouts_per_step = 5\ntrain_s = 1\n"
            + 2 * "[[nodes]]\nname = 'a'\ncount = 1\nrollouts_per_s = 1\nlatency_s = 1\n",
            "a unique name",
        ),
        ("rollouts_per_step = 5\ntrain_s = 1\n", "there is no [[nodes]]"),
    ],
)
def test_a_wrong_file_is_named_with_its_error(tmp_path: Path, text: str, got: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        fleet_of_file(path)
    assert got in str(refused.value) and "--example" in str(refused.value)


def test_names_are_shown_without_terminal_control_characters(example: Path) -> None:
    example.write_text(EXAMPLE.replace('"laptop"', '"lap\\u001b[2Jtop\\n"'))
    assert fleet_of_file(example).nodes[0].name == "lap [2Jtop"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        fleet_of_file(tmp_path / "none.toml")


def test_other_modes_know_no_staleness(example: Path) -> None:
    example.write_text(EXAMPLE.replace('"async"', '"sequential"').replace("publish_every = 1 ", "publish_every = 2 "))
    fleet = fleet_of_file(example)
    assert (fleet.workload.staleness_bound, fleet.workload.publish_every) == (0, 1)
    with pytest.raises(ConfigError, match="async"):
        changed(fleet, staleness=1)


def test_settings_and_nodes_are_changed(example: Path) -> None:
    fleet = changed(fleet_of_file(example), staleness=3, publish_every=4, add=["laptop=5", "gpu=1"])
    assert (fleet.workload.max_staleness, fleet.workload.publish_every) == (3, 4)
    assert [(kind.name, kind.count, kind.cost_per_h) for kind in fleet.kinds] == [
        ("laptop", 25, 0.0),
        ("rented GPU", 3, 0.45),
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"add": ["laptop"]}, "needs a class of nodes and a number"),
        ({"add": ["laptop=-1"]}, "needs a class of nodes and a number"),
        ({"add": ["=3"]}, "needs a class of nodes and a number"),
        ({"add": ["phone=3"]}, "No class of nodes has that name"),
        ({"add": ["p=1"]}, "Several classes"),
        ({"staleness": 0, "publish_every": 2}, "fresh enough"),
    ],
)
def test_changes_that_make_no_sense(example: Path, change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        changed(fleet_of_file(example), **change)  # type: ignore[arg-type]


def test_a_plan_of_the_example(example: Path, tmp_path: Path) -> None:
    plan = make_plan(fleet_of_file(example), target=0.98)
    assert not plan.prediction.busy
    assert plan.advice.added == (("laptop", 8), ("rented GPU", 2))
    assert plan.times_as_many == pytest.approx(1.23, abs=0.02)
    assert plan.verdict.endswith("Add 8 nodes like laptop, or add 2 nodes like rented GPU.")
    write_json(plan, tmp_path / "plan.json")
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["advice"]["added"] == {"laptop": 8, "rented GPU": 2}
    assert told["prediction"]["missing_per_s"] == pytest.approx(512 / 20.5 - 20)
    assert [node["name"] for node in told["nodes"]] == ["laptop", "rented GPU"]


def test_where_a_runs_processes_are_in_a_cluster(store: Store) -> None:
    write_books(store)
    ray = {"address": "ray://head:10001", "verifier_gpus": 0.5, "evaluator_cpus": 0, "evaluator_resources": {"base": 1}}
    sections = {"trust": {"verifier": "ray"}, "evaluation": {"by": "ray"}, "ray": ray}
    fleet = fleet_of_run(store, HubConfig.model_validate(sections))
    assert fleet.verifying == "a Ray actor at ray://head:10001, 1 CPU, 0.5 GPU"
    assert fleet.evaluating == "a Ray actor at ray://head:10001, 1 base"
    assert list(plan_lines(make_plan(fleet, target=1.0)))[3:6] == [
        f"Scoring       {fleet.scoring}",
        f"Verifying     {fleet.verifying}",
        f"Evaluating    {fleet.evaluating}",
    ]


def test_a_run_that_never_ends_has_no_duration(example: Path, tmp_path: Path) -> None:
    fleet = fleet_of_file(example)
    plan = make_plan(replace(fleet, nodes=()), target=1.0)
    assert plan.as_json()["prediction"]["period_s"] is None
    write_json(plan, tmp_path / "plan.json")


def test_a_plan_by_a_runs_books(store: Store) -> None:
    config = HubConfig(training=TrainingConfig(max_staleness=1))
    with pytest.raises(ConfigError, match="not trained a step yet"):
        fleet_of_run(store, config)
    write_books(store)
    store.node_seen(node_id="slow0", public_key=b"k", name="x", backend="torch", device="a\x1b[2J\u202eb", now=1.0)
    fleet = fleet_of_run(store, config)
    assert [kind.name for kind in fleet.kinds] == ["torch · RTX 4070", "torch · a [2J b"], (
        "no control character is printed"
    )
    assert fleet.workload.max_staleness == 1
    assert len(fleet.nodes) == 3
    assert (fleet.verifying, fleet.evaluating) == ("a separate process of the hub", "the learner, between two steps")
    assert fleet.spent is not None and fleet.spent.idle["rollouts"] > 0.3
    assert make_plan(fleet, target=1.0).as_json()["spent"]["training"] == fleet.spent.training


def test_a_byte_order_mark_and_too_many_lists(example: Path) -> None:
    expected = fleet_of_file(example)
    example.write_bytes(b"\xef\xbb\xbf" + example.read_bytes())
    assert fleet_of_file(example) == expected
    example.write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        fleet_of_file(example)
