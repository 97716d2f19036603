from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.scoring.asked import AskedGroup, AskedGroups


class Stored:
    def __init__(self, closed: Mapping[int, AskedGroup]) -> None:
        self._closed = closed
        self.wanted: list[Sequence[int]] = []

    async def load(self, group_ids: Sequence[int]) -> Mapping[int, AskedGroup]:
        self.wanted.append(group_ids)
        return {group_id: self._closed[group_id] for group_id in group_ids if group_id in self._closed}


def asked(temperature: float) -> AskedGroup:
    return AskedGroup(
        prompt_ids=np.array([1, 2], np.int32),
        seed=7,
        sampling=SamplingParameters(temperature=temperature, max_tokens=5),
    )


def test_an_open_group_is_found_until_it_is_removed() -> None:
    groups, one = AskedGroups(), asked(0.5)
    groups.add(8, one)
    assert (groups.of(8), groups.sampling(8), groups.of(9), groups.sampling(9)) == (one, one.sampling, None, None)
    groups.remove(8)
    groups.remove(8)
    assert groups.of(8) is None


def test_closed_groups_are_read_and_open_ones_are_not() -> None:
    groups, is_open, is_closed = AskedGroups(), asked(0.5), asked(1.5)
    groups.add(8, is_open)
    stored = Stored({9: is_closed})

    assert asyncio.run(groups.load([8, 9])) == {8: is_open}
    groups.closed_are_in(stored)
    assert asyncio.run(groups.load([8, 9, 10, 9])) == {8: is_open, 9: is_closed}
    assert stored.wanted == [[9, 10]]
    assert asyncio.run(groups.load([8])) == {8: is_open}
    assert stored.wanted == [[9, 10]]
