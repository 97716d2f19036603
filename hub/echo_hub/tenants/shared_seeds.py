"""Seeds for sample requests whose client gave none, without I/O. Requests that are equal get one seed and consecutive
indices.

Example: a program asks 16 times for one sample of the same prompt. All 16 requests get the seed of the first, and the
indices 0 to 15. A drawer may compute one prefill for all 16 requests. The tokens do not depend on the grouping.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.requests import SamplingWish

MOST_INDICES: Final = 64
"""Largest number of samples that share a seed."""
_KEPT: Final = 1_024
"""Number of the newest seeds that are kept, so that further requests may share them."""


@dataclass(slots=True)
class _Seed:
    seed: int
    next_index: int


def equality_key(tenant_id: str, policy_version: int, prompt_ids: NDArray[np.int32], wish: SamplingWish) -> bytes:
    """Return a hash of tenant, version, prompt and sampling parameters, without seed and number of samples."""
    stop_ids = None if wish.stop_ids is None else sorted(wish.stop_ids)
    parts = (tenant_id, policy_version, wish.max_tokens, wish.temperature, stop_ids, wish.stop_strings, wish.checked)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(prompt_ids).tobytes())
    return digest.digest()


class SharedSeeds:
    """The newest seeds since the hub's start. A restarted hub begins with new seeds, so no (seed, index) is used
    twice."""

    def __init__(self) -> None:
        self._seeds: OrderedDict[bytes, _Seed] = OrderedDict()

    def take(self, key: bytes, num_samples: int, new_seed: int) -> tuple[int, int]:
        """Return the seed and the first index for a request. `new_seed` is used if the request can share no earlier
        seed."""
        found = self._seeds.get(key)
        if found is None or found.next_index + num_samples > MOST_INDICES:
            found = _Seed(new_seed, 0)
            self._seeds[key] = found
        self._seeds.move_to_end(key)
        if len(self._seeds) > _KEPT:
            self._seeds.popitem(last=False)
        first, found.next_index = found.next_index, found.next_index + num_samples
        return found.seed, first
