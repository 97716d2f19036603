"""Building the documentation's site gives no warning, and its pages load nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from scripts.docs.__main__ import ROOT, prepare

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.docs", "--build", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "build"
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stderr
    return folder / "site"


class Page(HTMLParser):
    """Collects the files that a page loads, its links and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.ids.add(said.get("id", ""))
        if tag in LOADING and said.get("rel") != "canonical":
            self.loads.add(said.get(LOADING[tag], ""))
        if tag == "a" and "href" in said:
            self.links.add(said["href"])


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    source = {path.relative_to(site.parent / "source") for path in (site.parent / "source").rglob("*.md")}
    config = (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8")
    tomllib.loads(config)
    assert {Path(name) for name in re.findall(r'"([\w/-]+\.md)"', config)} == source
    assert {"README.md", "SECURITY.md"} - {path.name for path in source} == {"README.md"}
    for path in source:
        page = path.with_suffix("") if path.stem != "index" else path.parent
        assert (site / page / "index.html").is_file()


def test_every_link_and_picture_of_the_site_exists(site: Path) -> None:
    """The site's builder checks neither pictures nor navigation, so this test does."""
    pages = pages_of(site)
    wrong = []
    for path, page in pages.items():
        for target in {*page.loads, *page.links}:
            if re.match(r"[a-z]+:", target) or not target:
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and file in pages and anchor not in pages[file].ids):
                wrong.append(f"{path.relative_to(site)}: {target}")
    assert wrong == []


def test_no_page_loads_resources_from_other_hosts(site: Path) -> None:
    loaded = {target for page in pages_of(site).values() for target in page.loads}
    assert {target for target in loaded if re.match(r"([a-z]+:)?//", target)} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(\s*[\"']?(?:https?:)?//[^)]*", styles) == []


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_reader_finds_a_word_and_no_request_leaves(browser: Browser, address: str) -> None:
    page = browser.new_page()
    asked: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    for path in ("/", "/docs/reference/protocol/", "/docs/operator/"):
        page.goto(address + path, wait_until="networkidle")
        assert page.locator("h1").count() == 1
    page.keyboard.press("Control+k")
    page.keyboard.type("screened")
    page.get_by_text("States and drop reasons").last.wait_for()
    assert failures == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    prepare(tmp_path)
    glossary = tmp_path / "source" / "docs" / "glossary.md"
    glossary.write_text(glossary.read_text(encoding="utf-8") + "\n[x](operator.md#no-such-heading)\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0 and "anchor does not exist" in done.stdout + done.stderr
