import sys

import pytest

from echo_node.core.notices import Notice
from echo_node.host.notifications import MOST_SHOWN, PATH, SERVICE, notify
from tests.echo_node.host.conftest import Desktop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="D-Bus is how Linux desktops do it")
NOTICE = Notice("The hub has banned this node", 'It says: <a href="http://x">why</a> & more')


def shows(desktop: Desktop, *capabilities: str) -> None:
    desktop.answers[PATH, "GetCapabilities"] = ("as", (list(capabilities),))
    desktop.answers[PATH, "Notify"] = ("u", (7,))
    desktop.serve(SERVICE)


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [
        (["body", "body-markup"], 'It says: &lt;a href="http://x"&gt;why&lt;/a&gt; &amp; more'),
        (["body"], 'It says: <a href="http://x">why</a> & more'),
    ],
)
def test_a_notice_is_shown_as_text(desktop: Desktop, capabilities: list[str], text: str) -> None:
    shows(desktop, *capabilities)
    assert notify(NOTICE)
    assert desktop.asked == [(PATH, "GetCapabilities"), (PATH, "Notify")]
    name, replaces, _, title, body, actions, hints, expires = desktop.bodies[1]
    assert (name, replaces, title, body) == ("echo-node", 0, "The hub has banned this node", text)
    assert (actions, hints, expires) == ([], {"urgency": ("y", 2)}, -1)


def test_long_words_are_cut(desktop: Desktop) -> None:
    shows(desktop)
    assert notify(Notice("t", "x" * 10_000))
    assert len(desktop.bodies[1][4]) == MOST_SHOWN


def test_without_a_notification_service_the_call_reports_it(desktop: Desktop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not notify(NOTICE)
    desktop.serve(SERVICE)
    assert not notify(NOTICE), "it answers with an error"
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nonexistent/bus")
    assert not notify(NOTICE)
