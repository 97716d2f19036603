"""The layers hold: who imports whom, what the pure parts never touch, and that every test has its module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "echo_hub": ROOT / "hub" / "echo_hub",
    "echo_node": ROOT / "edge_client" / "echo_node",
    "echo_shared": ROOT / "shared" / "echo_shared",
}
HEAVY = ("torch", "transformers", "peft", "accelerate")
IMPURE = ("asyncio", "socket", "threading", "time", "random", "os", "logging", "subprocess", "multiprocessing")
TORCH_ALLOWED = ("echo_hub.learner", "echo_node.backends.torch_", "echo_node.backends.vllm_", "echo_shared.torch_")
SHELLS_OF_SHARED = tuple(f"echo_shared.{name}" for name in ("swarm", "child", "settings", "torch_sampler"))
"""The modules of echo_shared that touch the world, or torch."""


def module_name(path: Path) -> str:
    for package, directory in PACKAGES.items():
        if path.is_relative_to(directory):
            return ".".join([package, *path.relative_to(directory).with_suffix("").parts]).removesuffix(".__init__")
    raise ValueError(path)


MODULES = {module_name(path): path for directory in PACKAGES.values() for path in sorted(directory.rglob("*.py"))}


@cache
def imports(module: str) -> tuple[str, ...]:
    """All that `module` imports, inside functions too; `from a import b` counts as a.b."""
    return tuple(_imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def offences(modules: list[str], *forbidden: str) -> list[str]:
    return [f"{module} imports {name}" for module in modules for name in imports(module) if within(name, *forbidden)]


def modules_of(*packages: str) -> list[str]:
    return [module for module in MODULES if within(module, *packages)]


@pytest.mark.parametrize(
    ("package", "strangers"),
    [("echo_hub", ("echo_node",)), ("echo_node", ("echo_hub",)), ("echo_shared", ("echo_hub", "echo_node"))],
)
def test_the_sides_do_not_know_each_other(package: str, strangers: tuple[str, ...]) -> None:
    assert offences(modules_of(package), *strangers) == []


def test_cores_and_sessions_are_pure() -> None:
    pure = modules_of("echo_hub.core", "echo_node.core", "echo_shared.sessions", "echo_shared.messages")
    assert offences(pure, *IMPURE) == []


@pytest.mark.parametrize("side", ["echo_hub", "echo_node"])
def test_cores_import_only_themselves_and_what_is_pure_in_shared(side: str) -> None:
    core = modules_of(f"{side}.core")
    own = [f"{m} imports {n}" for m in core for n in imports(m) if within(n, side) and not within(n, f"{side}.core")]
    assert own == []
    assert offences(core, *SHELLS_OF_SHARED) == []


def test_learner_stands_alone() -> None:
    shells = ("net", "store", "dashboard", "scoring", "core", "main", "hub")
    assert offences(modules_of("echo_hub.learner"), *(f"echo_hub.{name}" for name in shells)) == []


def test_torch_stays_in_its_places() -> None:
    elsewhere = [module for module in MODULES if not module.startswith(TORCH_ALLOWED)]
    assert offences(elsewhere, "torch", "peft", "accelerate") == []


def test_arrays_never_travel_as_pickle() -> None:
    assert offences(list(MODULES), "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve") == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("echo_node.main", (*HEAVY, "llama_cpp", "gguf", "mlx", "aiohttp", "sqlalchemy", "echo_hub")),
        ("echo_hub.main", ("torch", "peft", "accelerate", "llama_cpp", "echo_node")),
    ],
)
def test_starting_a_program_loads_no_engine(module: str, absent: tuple[str, ...]) -> None:
    script = f"import {module}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert sorted(set(run.stdout.split()) & set(absent)) == []


def test_every_test_has_its_module() -> None:
    """tests/<package>/<path>/test_<module>.py tests <package>.<path>.<module>; other folders mirror the root's.

    A module with several test files has them as test_<module>_<aspect>.py. What belongs to no module (this file,
    whole-system tests) lies in tests/ itself or in tests/end_to_end/.
    """
    orphans = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = path.relative_to(ROOT / "tests")
        top, *folders = relative.parts[:-1] or ("",)
        words = path.stem.removeprefix("test_").split("_")
        names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        folder = PACKAGES.get(top, ROOT / top).joinpath(*folders)
        found = any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for name in names)
        if top not in ("", "end_to_end") and not found:
            orphans.append(str(relative))
    assert orphans == []
