from __future__ import annotations

from echo_node.config import NodeConfig
from echo_node.core.manners import MannersConfig
from echo_node.reloading import ENGINE, INTRODUCTION, WATCH, ChangedSettings, changes, in_force
from echo_node.settings_file import keys_of

BEFORE = NodeConfig(threads=1)


def test_every_reloadable_setting_exists_and_belongs_to_one_part() -> None:
    assert set(keys_of()) >= ENGINE | INTRODUCTION | WATCH
    assert len(ENGINE | INTRODUCTION | WATCH) == len(ENGINE) + len(INTRODUCTION) + len(WATCH)
    assert {key for key in keys_of() if key.startswith("manners.")} <= ENGINE | WATCH


def test_changes_are_reported_by_the_part_that_uses_them() -> None:
    assert changes(BEFORE, BEFORE) == ChangedSettings() and not ChangedSettings().all
    after = NodeConfig(
        threads=2, name="n", swarm_port=5, manners=MannersConfig(idle_after_s=5, cpu_share=0.5), insecure=True
    )
    found = changes(BEFORE, after)
    assert found == ChangedSettings(
        watch=("manners.idle_after_s",),
        engine=("threads", "manners.cpu_share"),
        introduction=("name",),
        restart=("swarm_port", "insecure"),
    )
    assert not found.choice and changes(BEFORE, NodeConfig(threads=1, backend="torch")).choice


def test_settings_for_the_next_start_wait_until_then() -> None:
    after = NodeConfig(threads=2, swarm_port=5)
    now = in_force(BEFORE, after)
    assert (now.threads, now.swarm_port) == (2, 0)
    assert changes(now, after).all == ("swarm_port",)
