from echo_node.core.history import KEPT, LATELY, SPAN_S, TokenHistory, lately


def test_each_span_has_its_rate() -> None:
    history = TokenHistory()
    for now, count in ((100.0, 0), (105.0, 40), (110.0, 100), (111.0, 500), (120.0, 150)):
        history.note(count, now)
    assert history.rates == (10.0, 5.0)


def test_spans_without_a_note_share_their_rate() -> None:
    history = TokenHistory()
    history.note(0, 0.0)
    history.note(300, 3 * SPAN_S)
    assert history.rates == (10.0, 10.0, 10.0)
    history.note(300, 4 * SPAN_S)
    assert history.rates[-1] == 0.0


def test_old_rates_are_forgotten() -> None:
    history = TokenHistory()
    for span in range(3 * KEPT):
        history.note(span, span * SPAN_S)
    history.note(0, 1e9)  # A long time has passed, as after the machine's sleep.
    assert len(history.rates) == KEPT


def test_lately_is_the_last_minute() -> None:
    assert lately(()) is None
    assert lately((8.0, 4.0)) == 6.0
    assert lately((999.0, *[2.0] * LATELY)) == 2.0
