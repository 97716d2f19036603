from __future__ import annotations

import logging

from echo_hub.views.notable import EVENTS_KEPT, MOST_CHARACTERS, NotableLog


def test_the_newest_log_lines_come_first() -> None:
    told: list[None] = []
    notable = NotableLog(lambda: told.append(None))
    log = logging.getLogger("test.notable")
    log.setLevel(logging.DEBUG)
    log.addHandler(notable)
    log.debug("not for the operator")
    for number in range(EVENTS_KEPT):
        log.info("node %d joined", number)
    log.warning("the learner died%s", "!" * 2 * MOST_CHARACTERS)
    log.removeHandler(notable)
    assert len(notable.events) == EVENTS_KEPT and len(told) == EVENTS_KEPT + 1
    newest, before = notable.events[0], notable.events[1]
    assert newest.text.startswith("the learner died!") and len(newest.text) == MOST_CHARACTERS
    assert (newest.warning, before.warning) == (True, False)
    assert before.text == f"node {EVENTS_KEPT - 1} joined"
