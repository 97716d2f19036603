"""The small random models that the engines' tests use."""

from __future__ import annotations

from tests.echo_node.backends.conftest import _one_thread, base, base_of, kit, make_adapter

__all__ = ["_one_thread", "base", "base_of", "kit", "make_adapter"]
