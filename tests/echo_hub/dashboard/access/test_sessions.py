from __future__ import annotations

from echo_hub.dashboard.access.sessions import LIFE_S, MOST, BrowserSession, BrowserSessions

NOW = 1_000.0


def test_a_session_expires_and_ends_at_logout() -> None:
    sessions = BrowserSessions()
    first, second = sessions.begin(NOW), sessions.begin(NOW)
    assert sessions.find(first.session_id, NOW) is first
    assert sessions.find("", NOW) is None and sessions.find("another", NOW) is None
    sessions.end(first.session_id)
    assert sessions.find(first.session_id, NOW) is None
    assert sessions.find(second.session_id, NOW + LIFE_S) is None


def test_the_oldest_makes_room() -> None:
    sessions = BrowserSessions()
    opened = [sessions.begin(NOW).session_id for _ in range(MOST + 3)]
    assert [session_id for session_id in opened if sessions.find(session_id, NOW) is None] == opened[:3]
    sessions.end_all()
    assert not any(sessions.find(session_id, NOW) for session_id in opened)


def test_a_key_is_valid_only_for_its_session() -> None:
    sessions = BrowserSessions()
    mine, others = sessions.begin(NOW), sessions.begin(NOW)
    assert mine.is_key(mine.key)
    for wrong in ("", "é", "\udcff", mine.session_id, others.key, mine.key[:-1], mine.key + "0"):
        assert not mine.is_key(wrong)


def test_ids_and_secrets_are_random() -> None:
    sessions = [BrowserSessions().begin(NOW) for _ in range(50)]
    assert len({session.session_id for session in sessions}) == len({s.key for s in sessions}) == 50
    assert all(isinstance(session, BrowserSession) and len(session.session_id) >= 43 for session in sessions)
