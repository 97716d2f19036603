from __future__ import annotations

from echo_hub.core.settings import CoordinatorSettings


def test_versions_are_due_every_period_and_after_the_last_step() -> None:
    settings = CoordinatorSettings(
        mode="async", steps=7, groups_per_step=1, group_size=2, deadline_s=1.0, max_staleness=2, publish_every=3
    )
    assert [version for version in range(8) if settings.is_due(version)] == [3, 6, 7]
    assert [settings.newest_due_version(version) for version in (0, 2, 3, 5, 7)] == [0, 0, 3, 3, 7]
