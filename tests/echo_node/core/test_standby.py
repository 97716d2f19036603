"""The sentences that tell the owner why the node is on standby, that is, gets no work."""

from __future__ import annotations

from echo_node.core.standby import SENTENCES, WORKS_AGAIN, sentence
from echo_shared.wire.messages import Standby, StandbyReason


def test_every_reason_has_a_sentence() -> None:
    assert SENTENCES.keys() == set(StandbyReason)
    for reason in StandbyReason:
        said = sentence(Standby(reason=reason, detail="It costs $2 an hour."))
        assert said.endswith("It costs $2 an hour.") and reason.value not in said
        assert said.startswith(SENTENCES[reason]) is (reason is not StandbyReason.NO_WORK_NOW)
        assert sentence(Standby(reason=reason)) == SENTENCES[reason]
    assert sentence(Standby(reason=None)) == WORKS_AGAIN


def test_at_the_runs_end_other_nodes_are_not_named_as_the_reason() -> None:
    said = sentence(Standby(reason=StandbyReason.NO_WORK_NOW, detail="The run is finished."))
    assert said == "The run is finished."
