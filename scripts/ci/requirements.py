"""Print the requirements of hub, node and tests in an environment without torch, one per line.

    python -m scripts.ci.requirements [EXTRA...]

The requirements are those of pyproject.toml: Echo's own, the named extras', and the test tools of the extra dev.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
NEED_TORCH: Final = frozenset({"peft", "torch"})
TEST_TOOLS: Final = frozenset(
    {"hypothesis", "jsonschema", "packaging", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist"}
)


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements. Raises KeyError if pyproject.toml has no such extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_extra: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(text for extra in extras for text in of_extra[extra])]
    tools = [text for text in of_extra["dev"] if name_of(text) in TEST_TOOLS]
    assert len(tools) == len(TEST_TOOLS), "the extra dev has each test tool"
    return [*(text for text in wanted if name_of(text) not in NEED_TORCH), *tools]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
