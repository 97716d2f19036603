"""Builds the documentation: `python -m scripts.docs` (`make docs`), into build/docs/site.

The site mirrors this repository's Markdown files: README.md is its first page, and links between files work unchanged.
Generated pages are added in docs/reference/ and docs/benchmarks/; they only exist in build/docs/source. Warnings of
Zensical, such as a broken link or anchor, are errors.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_hub.main import app as hub
from echo_node.main import app as node
from scripts.docs import benchmarks, commands, http_api, metrics, protocol, rollouts, settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("SECURITY.md", "CONTRIBUTING.md")


def write_source(folder: Path, *, figures: Path | None = None) -> None:
    """Write all pages into `folder`, handwritten and generated ones. `figures` is the folder of benchmark results."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("zensical.toml"))
    shutil.copyfile(ROOT / "README.md", folder / "index.md")
    for name in PAGES:
        shutil.copyfile(ROOT / name, folder / name)
    reference = folder / "docs" / "reference"
    reference.mkdir()
    for name, page in {
        "hub-settings": settings.hub_page(),
        "node-settings": settings.node_page(),
        "protocol": protocol.page(),
        "http-api": http_api.page(),
        "metrics": metrics.page(),
        "rollouts": rollouts.page(),
        "echo-hub": commands.page("echo-hub", hub, "The operator's commands."),
        "echo-node": commands.page("echo-node", node, "The commands of those who lend a machine."),
    }.items():
        (reference / f"{name}.md").write_text(page, encoding="utf-8")
    of_benchmarks = folder / "docs" / "benchmarks"
    of_benchmarks.mkdir()
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    benchmarks.write_pages(of_benchmarks, results=results, figures=figures)


def prepare(build: Path, *, figures: Path | None = None) -> None:
    """Empty `build`; write Zensical's configuration and all pages into it."""
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    shutil.copyfile(ROOT / "docs" / "zensical.toml", build / "zensical.toml")
    write_source(build / "source", figures=figures)


def main(
    build: Annotated[Path, typer.Option(help="Folder for pages and site; what lies there is deleted.")] = Path(
        "build/docs"
    ),
    figures: Annotated[
        Path | None, typer.Option(help="Folder of `python -m benchmarks NAME --json FOLDER/NAME.json`.")
    ] = None,
    serve: Annotated[bool, typer.Option(help="Serve the site on loopback in place of building it.")] = False,
) -> None:
    """Write the pages of the documentation, and build the site from them."""
    prepare(build, figures=figures)
    what = ["serve"] if serve else ["build", "--strict"]
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", *what], cwd=build, check=False).returncode)


if __name__ == "__main__":
    typer.run(main)
