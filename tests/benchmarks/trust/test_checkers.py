from __future__ import annotations

import numpy as np
import pytest

from benchmarks.hostile.falsifications import Accuses
from benchmarks.trust.checkers import judged
from benchmarks.trust.protocol import Unnoticed
from echo_hub.core.trust.reasons import OUTVOTED


def test_the_liar_is_found_by_what_it_says_and_no_honest_node_suffers() -> None:
    assert judged(("proven", ""), 0) is None
    assert judged(("suspect", "The learner could not train on a rollout of it."), 0) is None, "that is no verdict on it"
    assert judged(("suspect", OUTVOTED), 0) == "the liar is suspect, the honest ones are not quarantined"
    with pytest.raises(Unnoticed, match="1 honest"):
        judged(("suspect", OUTVOTED), 1)


@pytest.mark.parametrize(("share", "lies"), [(1.0, 4), (0.5, 2)])
def test_a_liar_says_that_draws_fell_elsewhere(share: float, lies: int) -> None:
    liar, honest = Accuses(share), (np.array([0.1, 0.7]), np.array([-1.0, -2.0]))
    found = [liar.found(honest) for _ in range(4)]
    told = [below for below, _ in found if not np.array_equal(below, honest[0])]
    assert len(told) == lies and all(np.allclose(below, [0.6, 0.2]) for below in told)
    assert all(np.array_equal(logprobs, honest[1]) for _, logprobs in found)
