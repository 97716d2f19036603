"""Replay of nodes' routes in the learner's forward passes: see `echo_shared.sampling.torch_routes`.

A completion's tokens follow the routes with which its node computed them. Its prompt has no routes: the packed sequence
holds one copy of a prompt for the completions of several nodes, whose engines may route it differently.

Dimensions: T positions of the packed sequence, B bytes of a route (layers times experts of a token).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner.packing import Rows
from echo_hub.learner.settings import TrainingGroup, TrainingRollout
from echo_shared.sampling.torch_routes import Replay, Routers
from echo_shared.wire.messages import NO_ROUTE


class RouteRows:
    """The routes of a packed sequence's positions, in order."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint8] | int] = []
        """Routes of consecutive positions [n, B], or the number of positions without route."""
        self._route_bytes = 0

    def skip(self, positions: int) -> None:
        """Add this many positions that have no recorded route."""
        self._parts.append(positions)

    def add(self, routes: bytes, num_tokens: int, positions: int) -> None:
        """Add the first `positions` tokens of a completion of `num_tokens` tokens. `routes` has B bytes for each token,
        or is empty.
        """
        if not routes:
            self.skip(positions)
            return
        self._route_bytes = len(routes) // num_tokens
        self._parts.append(np.frombuffer(routes, np.uint8).reshape(num_tokens, -1)[:positions])

    def together(self) -> Tensor | None:
        """Return the routes [T, B] of all positions; None if no position has a route."""
        if not self._route_bytes:
            return None
        parts = [
            np.full((part, self._route_bytes), NO_ROUTE, np.uint8) if isinstance(part, int) else part
            for part in self._parts
        ]
        return torch.from_numpy(np.concatenate(parts))


def fitting(groups: Sequence[TrainingGroup], routers: Routers | None) -> list[TrainingGroup]:
    """Return the groups. Drop the routes of each rollout whose routes do not fit this model's routers."""
    return [replace(group, rollouts=tuple(_fitting(one, routers) for one in group.rollouts)) for group in groups]


def _fitting(rollout: TrainingRollout, routers: Routers | None) -> TrainingRollout:
    if fits(rollout.routes, len(rollout.completion_ids), routers):
        return rollout
    return replace(rollout, routes=b"")


def fits(routes: bytes, num_tokens: int, routers: Routers | None) -> bool:
    """Return True if the routes are empty, or have the size of the model's routes for `num_tokens` tokens."""
    return not routes or (routers is not None and len(routes) == num_tokens * routers.route_bytes)


def following(body: Any, routers: Routers | None, routes_TB: Tensor | None, *, rows: Rows | None = None) -> Any:
    """Return the model's body, so that its passes follow the routes: one pass over all positions or, with `rows`, one
    pass for each set of rows of similar length, as `packing.separate_states` makes them.
    """
    if routers is None or routes_TB is None:
        return body
    return _Following(body, routers, [routes_TB] if rows is None else rows.split(routes_TB[rows.laid_out.index]))


class _Following:
    def __init__(self, body: Any, routers: Routers, parts: Sequence[Tensor]) -> None:
        self._body = body
        self._routers = routers
        self._parts = iter(parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routes_TMK = next(self._parts).reshape(-1, self._routers.num_layers, self._routers.top_k)
        with self._routers.replaying(Replay(routes_TMK)):
            return self._body(*args, **kwargs)


def recomputing(routers: Routers | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts for a checkpointed layer: for its forward pass, and for its recomputation in the backward
    pass. Both use the same routes.
    """
    if routers is None or routers.current is None:
        return nullcontext(), nullcontext()
    return nullcontext(), routers.replaying(Replay(routers.current.routes_TMK))
