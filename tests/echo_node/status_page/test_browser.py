import stat
import sys
import threading
import webbrowser
from pathlib import Path

import pytest

from echo_node.status_page.browser import open_in_browser
from echo_shared.errors import StorageError

URL = 'http://127.0.0.1:1/a/enter?code=secret&x="><script>'


class Browser(webbrowser.BaseBrowser):
    def __init__(self) -> None:
        super().__init__("noting")
        self.opened: list[str] = []
        self.news = threading.Event()

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
        self.opened.append(url)
        self.news.set()
        return True


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Browser:
    browser = Browser()
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    monkeypatch.setattr(webbrowser, "_browsers", {})
    webbrowser.register("noting", None, browser, preferred=True)
    return browser


def test_the_code_is_in_a_private_file_and_on_no_command_line(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert open_in_browser(URL, file)
    assert browser.opened == [file.as_uri()]
    text = file.read_text()
    assert "code=secret" in text and "<script>" not in text
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_browser_the_command_reports_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    monkeypatch.setattr(webbrowser, "_browsers", {})
    assert not open_in_browser(URL, tmp_path / "page.html")


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(StorageError, match="cannot be opened"):
        open_in_browser(URL, tmp_path / "page.html")
    assert list((tmp_path / "page.html").iterdir()) == []
