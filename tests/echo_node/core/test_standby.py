"""A node without work says why, in a sentence."""

from __future__ import annotations

from echo_node.core.standby import SENTENCES, WORKS_AGAIN, sentence
from echo_shared.messages import Standby, StandbyReason


def test_every_reason_has_its_sentence() -> None:
    assert SENTENCES.keys() == set(StandbyReason)
    for reason in StandbyReason:
        said = sentence(Standby(reason=reason, detail="It costs $2 an hour."))
        assert said.endswith("It costs $2 an hour.") and reason.value not in said
        assert said.startswith(SENTENCES[reason]) is (reason is not StandbyReason.NO_WORK_NOW)
        assert sentence(Standby(reason=reason)) == SENTENCES[reason]
    assert sentence(Standby(reason=None)) == WORKS_AGAIN


def test_at_the_runs_end_nobody_is_said_to_have_other_nodes_before_it() -> None:
    said = sentence(Standby(reason=StandbyReason.NO_WORK_NOW, detail="The run is finished."))
    assert said == "The run is finished."
