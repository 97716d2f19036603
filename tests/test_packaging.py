"""pyproject.toml must declare every distribution that the code imports, constraints.txt must pin it, and the programs'
versions must agree.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import echo_shared
from echo_hub.run.base_files import BUILTIN, resolve_base

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BROUGHT_ALONG = {"annotated-types", "multidict", "pydantic-core", "yarl"}
"""Distributions that pydantic and aiohttp document as parts of themselves."""
OWN = {
    *("echo_hub", "echo_node", "echo_shared", "benchmarks", "scripts"),
    *(path.stem for path in (ROOT / "tests").rglob("*.py")),
}


OF_TESTS = {
    canonicalize_name(Requirement(line).name)
    for name in ("doors.txt", "agents.txt")
    for line in (ROOT / "scripts" / "ci" / name).read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}
"""Distributions in the environments of `make doors` and `make agents`, in which tests run separate programs."""


INSIDE = "hub/echo_hub/sessions/inside/"


def declared(*extras: str) -> set[str]:
    """Return the distributions that an installation with these extras requires, by canonical name."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def third_party(directory: str) -> dict[str, list[str]]:
    """Return the top-level modules of other projects that files below `directory` import, each with the importing
    files.
    """
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / directory).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {name.partition(".")[0] for name in names} - OWN - sys.stdlib_module_names:
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize(
    ("directory", "extras"),
    [
        ("hub", ("hub", "cpu", "gateways", "parquet", "ray", "wandb")),
        ("edge_client", ("cpu", "cuda", "mlx", "vllm", "tray")),
        ("shared", ("cpu", "cuda")),
        ("benchmarks", ("hub", "cpu", "benchmarks", "ray")),
        ("scripts", ("hub", "cpu", "dev")),
        ("tests", ("hub", "cpu", "mlx", "benchmarks", "dev")),
    ],
)
def test_every_import_is_declared(directory: str, extras: tuple[str, ...]) -> None:
    providers = metadata.packages_distributions()
    allowed = declared(*extras) | BROUGHT_ALONG | (OF_TESTS if directory in ("tests", "benchmarks") else set())
    # Left out: adapters import packages that are only in the interpreter of sessions.python.
    found = {
        name: [file for file in files if not file.startswith(INSIDE)] for name, files in third_party(directory).items()
    }
    undeclared = {
        name: files
        for name, files in found.items()
        if files and not {canonicalize_name(provider) for provider in providers.get(name, [name])} & allowed
    }
    assert undeclared == {}


def test_every_requirement_is_pinned_and_the_pins_fit() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert [str(pin) for pin in pins if [spec.operator for spec in pin.specifier] != ["=="]] == []
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert len(versions) == len(pins)
    extras = (text for extra in ("hub", "cpu", "docs", "dev") for text in EXTRAS[extra])
    wanted = [Requirement(text) for text in [*PROJECT["dependencies"], *extras]]
    misfits = [
        str(requirement)
        for requirement in wanted
        if not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert misfits == []


def test_versions_agree() -> None:
    assert PROJECT["version"] == echo_shared.__version__


@pytest.mark.parametrize("reference", BUILTIN)
def test_wheels_carry_the_base_models_in_the_box(reference: str) -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    package, directory = ROOT / "hub" / "echo_hub", resolve_base(reference)
    carried = {file for pattern in tool["setuptools"]["package-data"]["echo_hub"] for file in package.glob(pattern)}
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in directory.iterdir()} == names
    assert {directory / name for name in names} <= carried
