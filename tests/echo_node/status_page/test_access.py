import re

import pytest

from echo_node.status_page import access as access_module
from echo_node.status_page.access import CODE_S, COOKIE, MOST, SESSION_S, PageAccess


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(access_module, "time", clock)
    return clock


@pytest.fixture
def access(clock: Clock) -> PageAccess:
    return PageAccess()


def entered(access: PageAccess) -> str:
    """Return the Cookie header of a browser with access to the page."""
    given = access.enter(access.invite())
    assert given is not None
    return given.partition(";")[0]


def test_a_code_is_good_once(access: PageAccess) -> None:
    code = access.invite()
    cookie = access.enter(code)
    assert cookie is not None and access.is_in(cookie.partition(";")[0])
    assert access.enter(code) is None


def test_the_cookie_is_no_scripts_and_no_other_sites_and_no_other_ports(access: PageAccess) -> None:
    cookie = access.enter(access.invite())
    assert cookie is not None
    words = cookie.split("; ")[1:]
    assert {"HttpOnly", "SameSite=Strict", f"Path={access.path}"} <= set(words)
    assert re.fullmatch(r"/[\w-]{32}/", access.path) and access.path != PageAccess().path


def test_a_code_is_good_for_a_minute_and_a_session_for_half_a_day(access: PageAccess, clock: Clock) -> None:
    code = access.invite()
    clock.now += CODE_S
    assert access.enter(code) is None
    cookie = entered(access)
    clock.now += SESSION_S - 1
    assert access.is_in(cookie)
    clock.now += 1
    assert not access.is_in(cookie)


@pytest.mark.parametrize(
    "cookies", ["", f"{COOKIE}=", f"{COOKIE}=guess", "other=1", f'{COOKIE}="\x00";;=', "é=ü", ";" * 99]
)
def test_guesses_are_no_sessions(access: PageAccess, cookies: str) -> None:
    entered(access)
    assert not access.is_in(cookies)
    assert access.enter(cookies) is None


def test_other_cookies_of_the_host_are_not_in_the_way(access: PageAccess) -> None:
    assert access.is_in(f"theirs=1; {entered(access)}; more=2")


def test_codes_and_sessions_are_few(access: PageAccess) -> None:
    codes = [access.invite() for _ in range(MOST + 1)]
    assert access.enter(codes[0]) is None and access.enter(codes[1]) is not None
    cookies = [entered(access) for _ in range(MOST + 1)]
    assert not access.is_in(cookies[0]) and access.is_in(cookies[1])
