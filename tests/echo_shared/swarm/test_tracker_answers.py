"""A machine announces itself to the tracker from several addresses; failures of some of them are tolerable."""

from echo_shared.swarm.tracker_answers import TrackerAnswers

LOOPBACK, ETHERNET = ("127.0.0.1", 1), ("192.0.2.2", 2)


def test_failures_from_other_addresses_do_not_count_after_one_answer() -> None:
    answers = TrackerAnswers()
    answers.answered(LOOPBACK)
    assert [answers.failed(ETHERNET, times) for times in (1, 2, 9)] == [False] * 3


def test_failures_before_another_addresss_answer_do_not_count() -> None:
    answers = TrackerAnswers()
    assert not answers.failed(LOOPBACK, 1)
    answers.answered(ETHERNET)
    assert not answers.failed(LOOPBACK, 2)


def test_a_tracker_that_answers_no_address_is_a_problem() -> None:
    answers = TrackerAnswers()
    assert [answers.failed(one, times) for times in (1, 2) for one in (LOOPBACK, ETHERNET)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_tracker_that_has_fallen_silent_is_a_problem_at_once() -> None:
    answers = TrackerAnswers()
    answers.answered(LOOPBACK)
    answers.answered(ETHERNET)
    assert not answers.failed(ETHERNET, 1)
    assert answers.failed(LOOPBACK, 1)
    assert answers.failed(LOOPBACK, 2)
