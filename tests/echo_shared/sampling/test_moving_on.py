"""When a running completion moves to a new version: not shortly before its end, and not if the new version would spend
most time on re-reading tokens.
"""

from echo_shared.sampling.moving_on import ENDS_S, READING, READING_SHARE, MovingOn


def test_completions_close_to_their_end_are_not_interrupted() -> None:
    moving = MovingOn()
    assert not moving.is_due(100, token_s=ENDS_S / 100, now=0.0)
    assert moving.is_due(101, token_s=ENDS_S / 100, now=0.0)


def test_an_interruption_is_due_while_the_pace_is_unknown() -> None:
    moving = MovingOn()
    assert moving.is_due(1, token_s=0.0, now=0.0)
    moving.moved(1_000_000, tokens_per_s=0.0, now=0.0)
    assert moving.is_due(1, token_s=0.0, now=0.0)


def test_reading_again_takes_at_most_its_share() -> None:
    moving = MovingOn()
    moving.moved(32_000, tokens_per_s=100.0, now=50.0)
    reading_s = 32_000 * READING / 100.0
    until = 50.0 + reading_s / READING_SHARE
    assert not moving.is_due(10_000, token_s=1.0, now=until - 0.01)
    assert moving.is_due(10_000, token_s=1.0, now=until)
