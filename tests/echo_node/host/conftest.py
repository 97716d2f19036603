from tests.echo_node.host.sensors.conftest import Desktop, desktop

__all__ = ["Desktop", "desktop"]
