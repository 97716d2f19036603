"""Every file, link and setting that the documentation names must exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from echo_node.config import NodeConfig
from echo_node.core.manners import MannersConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build", "dist"}


def paths(text: str) -> set[str]:
    """Return quoted paths that begin with a folder of this repository."""
    quoted = re.findall(r"`([\w./-]+/[\w./-]*)`", text)
    return {name for name in quoted if name.split("/")[0] in TOP}


def links(text: str) -> set[str]:
    """Return the targets of links within the site."""
    return {target for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in target}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {name for name in paths(text) if not (ROOT / name).exists()}
    missing |= {target for target in links(text) if not (page.parent / target).exists()}
    assert missing == set()


def test_the_map_names_every_folder_of_code() -> None:
    named = paths((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    packages = ("hub/echo_hub", "edge_client/echo_node")
    folders = {
        f"{package}/{path.name}/" for package in packages for path in (ROOT / package).iterdir() if path.is_dir()
    }
    code = {folder for folder in folders if any((ROOT / folder).glob("*.py"))}
    assert code - named == set()


def test_settings_in_the_volunteers_pages_exist() -> None:
    pages = [ROOT / "docs" / "volunteer.md", *sorted((ROOT / "docs" / "volunteer").glob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    manners, top = set(MannersConfig.model_fields), set(NodeConfig.model_fields)
    told = re.findall(r"`((?:manners\.)?[a-z_]+) = ([^`]+)`", text)
    assert len(told) > 5
    for name, value in told:
        written = tomllib.loads(f"value = {value}")["value"]
        name = name.removeprefix("manners.")
        if name in manners:
            MannersConfig(**{name: written})
        else:
            assert name in top, f"{name} is no setting"
            NodeConfig.model_validate({name: written})
    table = text[text.index("| the node stops computing") : text.index("A machine without a desktop")]
    assert set(re.findall(r"`([a-z_]+)(?: = [^`]+)?`", table)) <= manners
