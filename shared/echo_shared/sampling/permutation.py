"""Keyed permutation of 0 .. size - 1 with constant-time access to any position and no stored table.

The permutation is a Feistel network over the next even number of bits. Values at or above `size` are permuted again
(cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain is less than four
times `size`, so a walk takes fewer than four network passes on average. The permutation mixes well but is not secret.
"""

from __future__ import annotations

from typing import Final

from echo_shared.sampling.draws import derive_seed

ROUNDS: Final = 4
"""Rounds of the Feistel network. Source: Luby and Rackoff (SIAM J. Comput. 17, 1988): four rounds give a strong
pseudorandom permutation if the round function is pseudorandom."""


def permuted(place: int, size: int, *key: int | str) -> int:
    """Return the element at `place` (0 .. size - 1) of the permutation of `key`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    found = place
    while True:
        left, right = found >> half_bits, found & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (derive_seed(*key, number, right) & mask)
        found = left << half_bits | right
        if found < size:
            return found
