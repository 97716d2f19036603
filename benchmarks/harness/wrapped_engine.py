"""A sampling engine that wraps another one. Subclasses define only the methods that behave differently."""

from __future__ import annotations

from typing import Any

from echo_node.backends.base import Engine


class WrappedEngine:
    """Passes every call on to `engine` (`echo_node.backends.base.Engine`)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
