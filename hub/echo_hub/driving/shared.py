"""The objects that all services of a hub share."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo_hub.dashboard.source import Changes
from echo_hub.driving.driver import Driver
from echo_hub.driving.event_queue import EventQueue
from echo_hub.driving.progress import RunProgress
from echo_hub.driving.resources import Resources
from echo_hub.gateways.connections import Connections
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.scoring.backlog import Backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Objects that all services of a hub share. Create with `of`, in the hub's event loop."""

    resources: Resources
    connections: Connections
    """Open connections of all nodes."""
    queue: EventQueue
    """Queue of events for the coordinator."""
    driver: Driver
    progress: RunProgress
    backlog: Backlog
    changes: Changes
    """Notified when the pages have something new to show."""
    live: LiveNodes = field(default_factory=LiveNodes)

    @classmethod
    def of(cls, resources: Resources, connections: Connections) -> Shared:
        config = resources.config
        queue, changes = EventQueue(), Changes()
        progress = RunProgress(last_version=config.training.steps, evaluated=resources.evaluated)
        backlog = Backlog(is_limited=not resources.scoring.has_judges)
        driver = Driver(
            coordinator=resources.coordinator,
            store=resources.store,
            queue=queue,
            progress=progress,
            backlog=backlog,
            changes=changes,
        )
        return cls(
            resources=resources,
            connections=connections,
            queue=queue,
            driver=driver,
            progress=progress,
            backlog=backlog,
            changes=changes,
        )
