from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tenants.gradient_state import GradientState, JournalKind, replayed

KINDS = st.lists(st.sampled_from(sorted(set(JournalKind) - {JournalKind.CREATE, JournalKind.LOAD})), max_size=12)


@given(KINDS)
def test_a_replay_gives_the_same_gradient_and_steps(kinds: list[JournalKind]) -> None:
    """Compare the gradient and the number of steps of a model with those of a replay of its journal."""
    steps, gradient = [], []
    state = GradientState(-1)
    for seq_id, kind in enumerate(kinds):
        if kind is JournalKind.STEP and state.is_spoiled:
            kind = kinds[seq_id] = JournalKind.DROPPED
        if kind is JournalKind.PASS:
            gradient.append(seq_id)
        elif kind is JournalKind.STEP:
            steps.append((seq_id, tuple(gradient)))
            gradient = []
        elif kind in (JournalKind.DROPPED, JournalKind.SPOILED):
            gradient = []
        state.note(kind, seq_id)

    again, left = [], []
    for seq_id, kind in replayed(list(enumerate(kinds))):
        if kind is JournalKind.PASS:
            left.append(seq_id)
        else:
            again.append((seq_id, tuple(left)))
            left = []
    assert again == steps
    assert state.is_spoiled or left == gradient
    assert not state.is_spoiled or left == []


@given(KINDS)
def test_nothing_is_lost_behind_the_clean_point(kinds: list[JournalKind]) -> None:
    state = GradientState(-1)
    for seq_id, kind in enumerate(kinds):
        state.note(kind, seq_id)
    behind = kinds[state.clean_seq + 1 :]
    assert JournalKind.STEP not in behind and JournalKind.DROPPED not in behind
    assert state.is_empty == (JournalKind.PASS not in behind and JournalKind.SPOILED not in behind)
    assert state.is_spoiled == (JournalKind.SPOILED in behind)
