from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import SamplingWish
from echo_hub.tenants.sampling_limits import SamplingFacts, complete

FACTS = SamplingFacts(vocabulary_size=9, context_tokens=20, stop_ids=frozenset({1}))


def test_a_hub_that_checks_nothing_promises_no_checked_samples() -> None:
    prompt, wish = np.array([3], np.int32), SamplingWish(max_tokens=4, checked=True)
    assert complete(prompt, wish, FACTS).checked
    blind = replace(FACTS, can_check=False)
    assert not complete(prompt, replace(wish, checked=False), blind).checked
    with pytest.raises(Refusal, match="checks none") as refused:
        complete(prompt, wish, blind)
    assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, "checked")
