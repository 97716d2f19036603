"""Groups of rollouts that tenants ask for: each answers one sample request, and has its own prompt, seed and sampling
parameters.

Groups of training and evaluation are not kept here. Their prompts follow from the group's id
(`echo_hub.scoring.problems`), and their parameters are the run's settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.scoring.checks import SamplingBounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AskedGroup:
    """A tenant's request for samples of one prompt."""

    prompt_ids: NDArray[np.int32]
    seed: int
    sampling: SamplingParameters


class StoredAsked(Protocol):
    """Reads closed groups of tenants from the store."""

    async def load(self, group_ids: Sequence[int]) -> Mapping[int, AskedGroup]:
        """Return the groups with these ids, by id. Groups that the store has deleted are left out."""


class AskedGroups:
    """The groups of tenants, by id. Open groups are in memory, closed ones are read from the store."""

    def __init__(self) -> None:
        self._open: dict[int, AskedGroup] = {}
        self._stored: StoredAsked | None = None

    def closed_are_in(self, stored: StoredAsked) -> None:
        """Set the store from which the groups that are no longer open are read."""
        self._stored = stored

    def add(self, group_id: int, asked: AskedGroup) -> None:
        self._open[group_id] = asked

    def remove(self, group_id: int) -> None:
        self._open.pop(group_id, None)

    def of(self, group_id: int) -> AskedGroup | None:
        """Return a tenant's group if it is open. Return None for closed groups, and for groups of the run."""
        return self._open.get(group_id)

    def sampling(self, group_id: int) -> SamplingParameters | None:
        """Return the sampling parameters of a tenant's group if it is open. Return None for closed groups, and for
        groups of the run."""
        asked = self._open.get(group_id)
        return None if asked is None else asked.sampling

    async def load(self, group_ids: Iterable[int]) -> dict[int, AskedGroup]:
        """Return the tenants' groups with these ids, open or closed. Groups that the store has deleted are left out."""
        wanted = dict.fromkeys(group_ids)
        found = {group_id: self._open[group_id] for group_id in wanted if group_id in self._open}
        missing = [group_id for group_id in wanted if group_id not in found]
        if missing and self._stored is not None:
            found.update(await self._stored.load(missing))
        return found


class GroupBounds:
    """Limits of completions for each group: a tenant's request has its own limits, all other groups have the run's
    limits."""

    def __init__(self, of_run: SamplingBounds, asked: AskedGroups) -> None:
        self.of_run = of_run
        self._asked = asked

    def of(self, group_id: int) -> SamplingBounds:
        return self.of_run.of_request(self._asked.sampling(group_id))
