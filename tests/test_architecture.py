"""The layers of the code: allowed imports between rooms (a room is a group of modules), modules without I/O, and a
module for every test file.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "echo_hub": ROOT / "hub" / "echo_hub",
    "echo_node": ROOT / "edge_client" / "echo_node",
    "echo_shared": ROOT / "shared" / "echo_shared",
}
ROOMS = (
    "echo_hub.core.nodes",
    "echo_hub.spread",
    "echo_hub.core.trust.evidence",
    "echo_hub.core.trust.likelihood",
    "echo_hub.driving.event_queue",
    "echo_hub.intake.episodes",
    "echo_hub.learner.models",
    "echo_hub.tenants.drawing",
    "echo_hub.tenants.refusal",
    "echo_hub.tenants.requests",
    "echo_hub.tenants.versions",
    "echo_hub.training.own_sampler",
    "echo_node.config",
)
"""Rooms that differ from the default. By default, a room is a folder directly below a package with its subfolders, or
all modules directly in a package.
"""
WIRING = ("echo_hub", "echo_hub.commands", "echo_hub.serving", "echo_node", "echo_node.commands")
"""Rooms that connect the others: each may import every room of its package, but no room may import it."""
ARROWS: dict[str, set[str]] = {
    "echo_hub.actions": set(),
    "echo_hub.config": {"echo_hub.tasks"},
    "echo_hub.run": {"echo_hub.config"},
    "echo_hub.tasks": set(),
    "echo_hub.core.nodes": set(),
    "echo_hub.spread": set(),
    "echo_hub.core.trust.likelihood": set(),
    "echo_hub.core.trust.evidence": {"echo_hub.core.trust.likelihood"},
    "echo_hub.core": {"echo_hub.core.nodes", "echo_hub.core.trust.evidence", "echo_hub.core.trust.likelihood"},
    "echo_hub.store": {
        "echo_hub.actions",
        "echo_hub.core",
        "echo_hub.spread",
        "echo_hub.core.trust.evidence",
    },
    "echo_hub.judges": {"echo_hub.config", "echo_hub.run"},
    "echo_hub.cluster": {"echo_hub.config", "echo_hub.learner"},
    "echo_hub.scoring": {
        "echo_hub.cluster",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.driving.event_queue",
        "echo_hub.judges",
        "echo_hub.run",
        "echo_hub.sessions",
        "echo_hub.tasks",
    },
    "echo_hub.sessions": {"echo_hub.config", "echo_hub.run", "echo_hub.tasks"},
    "echo_hub.evaluation": {
        "echo_hub.cluster",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.dashboard",
        "echo_hub.driving",
        "echo_hub.driving.event_queue",
        "echo_hub.learner",
        "echo_hub.net",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.sessions",
        "echo_hub.store",
        "echo_hub.tasks",
    },
    "echo_hub.learner": {"echo_hub.config", "echo_hub.core.trust.evidence"},
    "echo_hub.learner.models": {
        "echo_hub.learner",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.tenants.drawing",
        "echo_hub.tenants.refusal",
        "echo_hub.tenants.requests",
    },
    "echo_hub.verify": {
        "echo_hub.cluster",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.trust.evidence",
        "echo_hub.driving.event_queue",
        "echo_hub.learner",
        "echo_hub.net",
        "echo_hub.run",
    },
    "echo_hub.sinks": {
        "echo_hub.config",
        "echo_hub.dashboard",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.store",
    },
    "echo_hub.simulator": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.nodes",
        "echo_hub.spread",
    },
    "echo_hub.net": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.spread",
        "echo_hub.run",
    },
    "echo_hub.gateways": {"echo_hub.config", "echo_hub.core", "echo_hub.net"},
    "echo_hub.views": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.nodes",
        "echo_hub.spread",
        "echo_hub.dashboard",
        "echo_hub.operation",
        "echo_hub.run",
        "echo_hub.store",
    },
    "echo_hub.operation": {"echo_hub.config", "echo_hub.core"},
    "echo_hub.dashboard": {"echo_hub.actions"},
    "echo_hub.distribution": {
        "echo_hub.core",
        "echo_hub.spread",
        "echo_hub.dashboard",
        "echo_hub.driving",
        "echo_hub.driving.event_queue",
        "echo_hub.net",
        "echo_hub.run",
        "echo_hub.store",
        "echo_hub.training.own_sampler",
    },
    "echo_hub.intake": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.nodes",
        "echo_hub.dashboard",
        "echo_hub.distribution",
        "echo_hub.driving",
        "echo_hub.driving.event_queue",
        "echo_hub.evaluation",
        "echo_hub.intake.episodes",
        "echo_hub.net",
        "echo_hub.scoring",
        "echo_hub.sessions",
        "echo_hub.store",
        "echo_hub.training",
        "echo_hub.verify",
    },
    "echo_hub.lifecycle": {
        "echo_hub.cluster",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.dashboard",
        "echo_hub.evaluation",
        "echo_hub.learner",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.sessions",
        "echo_hub.store",
        "echo_hub.tasks",
        "echo_hub.views",
    },
    "echo_hub.talking": {
        "echo_hub.config",
        "echo_hub.dashboard",
        "echo_hub.learner",
        "echo_hub.run",
    },
    "echo_hub.bundles": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.nodes",
        "echo_hub.core.trust.evidence",
        "echo_hub.core.trust.likelihood",
        "echo_hub.evaluation",
        "echo_hub.intake.episodes",
        "echo_hub.learner",
        "echo_hub.lifecycle",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.store",
        "echo_hub.verify",
        "echo_hub.views",
    },
    "echo_hub.oversight": {
        "echo_hub.actions",
        "echo_hub.cluster",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.dashboard",
        "echo_hub.distribution",
        "echo_hub.driving",
        "echo_hub.driving.event_queue",
        "echo_hub.evaluation",
        "echo_hub.intake",
        "echo_hub.intake.episodes",
        "echo_hub.lifecycle",
        "echo_hub.net",
        "echo_hub.operation",
        "echo_hub.run",
        "echo_hub.sessions",
        "echo_hub.sinks",
        "echo_hub.store",
        "echo_hub.training",
        "echo_hub.verify",
        "echo_hub.views",
    },
    "echo_hub.training": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.nodes",
        "echo_hub.dashboard",
        "echo_hub.distribution",
        "echo_hub.driving",
        "echo_hub.driving.event_queue",
        "echo_hub.evaluation",
        "echo_hub.intake.episodes",
        "echo_hub.learner",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.training.own_sampler",
    },
    "echo_hub.driving": {
        "echo_hub.cluster",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.dashboard",
        "echo_hub.driving.event_queue",
        "echo_hub.gateways",
        "echo_hub.learner",
        "echo_hub.net",
        "echo_hub.operation",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.sessions",
        "echo_hub.store",
    },
    "echo_hub.driving.event_queue": {"echo_hub.core"},
    "echo_hub.intake.episodes": {
        "echo_hub.core",
        "echo_hub.learner",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.sessions",
        "echo_hub.store",
        "echo_hub.verify",
    },
    "echo_hub.openai": {
        "echo_hub.run",
        "echo_hub.tasks",
        "echo_hub.tenants",
        "echo_hub.tenants.drawing",
        "echo_hub.tenants.refusal",
        "echo_hub.tenants.requests",
    },
    "echo_hub.tenants": {
        "echo_hub.actions",
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.driving.event_queue",
        "echo_hub.run",
        "echo_hub.scoring",
        "echo_hub.store",
        "echo_hub.tenants.drawing",
        "echo_hub.tenants.refusal",
        "echo_hub.tenants.requests",
        "echo_hub.tenants.versions",
    },
    "echo_hub.tenants.drawing": {"echo_hub.tenants.requests"},
    "echo_hub.tenants.refusal": set(),
    "echo_hub.tenants.requests": set(),
    "echo_hub.tenants.versions": set(),
    "echo_hub.tinker": {"echo_hub.tenants", "echo_hub.tenants.refusal", "echo_hub.tenants.requests"},
    "echo_hub.training.own_sampler": {
        "echo_hub.config",
        "echo_hub.core",
        "echo_hub.core.nodes",
        "echo_hub.driving.event_queue",
    },
    "echo_node.core": set(),
    "echo_node.host": {"echo_node.core"},
    "echo_node.lending": set(),
    "echo_node.config": {"echo_node.core", "echo_node.host", "echo_node.lending"},
    "echo_node.backends": {"echo_node.host", "echo_node.lending"},
    "echo_node.engine": {
        "echo_node.backends",
        "echo_node.config",
        "echo_node.core",
        "echo_node.host",
    },
    "echo_node.net": {"echo_node.core", "echo_node.host"},
    "echo_node.status_page": set(),
    "echo_shared": set(),
    "echo_shared.cage": set(),
    "echo_shared.files": {"echo_shared"},
    "echo_shared.process": {"echo_shared"},
    "echo_shared.delta": {"echo_shared", "echo_shared.files"},
    "echo_shared.gguf": {"echo_shared", "echo_shared.delta", "echo_shared.files"},
    "echo_shared.signing": {"echo_shared", "echo_shared.files"},
    "echo_shared.wire": {"echo_shared", "echo_shared.signing"},
    "echo_shared.logs": {"echo_shared", "echo_shared.wire"},
    "echo_shared.sampling": {"echo_shared", "echo_shared.wire"},
    "echo_shared.records": {"echo_shared", "echo_shared.signing", "echo_shared.wire"},
    "echo_shared.artefacts": {"echo_shared", "echo_shared.files", "echo_shared.signing", "echo_shared.wire"},
    "echo_shared.swarm": {
        "echo_shared",
        "echo_shared.artefacts",
        "echo_shared.files",
        "echo_shared.process",
        "echo_shared.wire",
    },
}
"""Permitted imports: each room's list of rooms of the same package. echo_shared is open to every room."""
MOST_CALLABLES = 49
"""Limit on the number of function parameters whose annotation is Callable or an alias of it. Clocks and random sources
count too.
"""
HEAVY = ("torch", "transformers", "peft", "accelerate")
IMPURE = (
    "asyncio",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "shutil",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
)
PURE = (
    "echo_hub.core",
    "echo_hub.operation.alert",
    "echo_hub.operation.events",
    "echo_hub.operation.problems",
    "echo_hub.operation.state",
    "echo_hub.sessions.core",
    "echo_hub.simulator.simulation",
    "echo_node.core",
    "echo_shared.wire.sessions",
    "echo_shared.wire.messages",
)
"""Modules without I/O, clock or randomness, also in all that they import."""
TORCH_ALLOWED = (
    "echo_hub.evaluation.worker",  # A separate process that samples with the learner's policy.
    "echo_hub.judges.worker",  # A separate process for a reward model.
    "echo_hub.learner",
    "echo_hub.talking.talker",  # Runs in the command `echo-hub chat`, or in the process of the next module.
    "echo_hub.talking.worker",  # A separate process that samples for a page.
    "echo_hub.lifecycle.merging",  # Imports it only while the command `echo-hub export --merged` runs.
    "echo_hub.verify.worker",  # A separate process that computes with the learner's policy.
    "echo_hub.verify.measuring",  # Part of the process of `echo_hub.verify.worker`, as is the next module.
    "echo_hub.verify.emulation",
    "echo_hub.verify.gguf_weights",
    "echo_node.backends.torch_",
    "echo_node.backends.vllm_",
    "echo_shared.sampling.torch_",
)


def module_name(path: Path) -> str:
    for package, directory in PACKAGES.items():
        if path.is_relative_to(directory):
            return ".".join([package, *path.relative_to(directory).with_suffix("").parts]).removesuffix(".__init__")
    raise ValueError(path)


MODULES = {module_name(path): path for directory in PACKAGES.values() for path in sorted(directory.rglob("*.py"))}


@cache
def imports(module: str) -> tuple[str, ...]:
    """Return all imports of `module`, also those inside functions; `from a import b` counts as a.b."""
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


def ours(module: str) -> frozenset[str]:
    """Return the modules of Echo that `module` imports, also inside functions, with the packages that contain them."""
    found = set()
    for name in imports(module):
        name = name if name in MODULES else name.rpartition(".")[0]
        while name in MODULES:
            found.add(name)
            name = name.rpartition(".")[0]
    return frozenset(found - {module})


def room(module: str) -> str:
    for known in ROOMS:
        if within(module, known):
            return known
    package, *path = module.split(".")
    is_folder = bool(path) and (PACKAGES[package] / path[0]).is_dir()
    return f"{package}.{path[0]}" if is_folder else package


def test_imports_between_rooms_match_the_table() -> None:
    drawn: dict[str, set[str]] = {name: set() for name in ARROWS}
    for module in MODULES:
        if (start := room(module)) not in WIRING:
            side = start.partition(".")[0]
            others = ours(module) - parents(module)
            ends = {room(name) for name in others if within(name, side) and MODULES[name].stat().st_size}
            drawn.setdefault(start, set()).update(ends - {start})
    assert drawn == ARROWS


def test_no_room_leads_back_to_itself() -> None:
    tuple(TopologicalSorter(ARROWS).static_order())


def test_no_module_imports_itself_by_way_of_others() -> None:
    tuple(TopologicalSorter({module: ours(module) - parents(module) for module in MODULES}).static_order())


def parents(module: str) -> set[str]:
    """Return the packages that contain the module; Python imports them first."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def test_pure_modules_import_only_pure_modules() -> None:
    reached: dict[str, str] = {}
    waiting = {module: module for module in modules_of(*PURE)}
    while waiting:
        module, way = waiting.popitem()
        reached[module] = way
        waiting |= {name: f"{way} > {name}" for name in ours(module) if name not in reached}
    impure = [f"{reached[module]} imports {name}" for module in reached for name in imports(module)]
    assert [line for line in impure if within(line.rpartition(" ")[2], *IMPURE)] == []


@pytest.mark.parametrize("side", ["echo_hub", "echo_node"])
def test_cores_import_only_themselves_of_their_side(side: str) -> None:
    core = modules_of(f"{side}.core")
    assert [
        f"{m} imports {n}" for m in core for n in imports(m) if within(n, side) and not within(n, f"{side}.core")
    ] == []


def test_only_listed_modules_import_torch() -> None:
    elsewhere = [module for module in MODULES if not module.startswith(TORCH_ALLOWED)]
    assert offences(elsewhere, "torch", "peft", "accelerate") == []


def test_arrays_never_travel_as_pickle() -> None:
    assert offences(list(MODULES), "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve") == []


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("echo_node.main", (*HEAVY, "llama_cpp", "gguf", "mlx", "aiohttp", "sqlalchemy", "echo_hub")),
        ("echo_hub.main", ("torch", "peft", "accelerate", "llama_cpp", "ray", "echo_node")),
        ("echo_hub.serving.opening", ("ray",)),
        ("echo_hub.learner.serve", ("sqlalchemy", "aiohttp", "llama_cpp", "echo_node")),
        ("echo_hub.learner.process, echo_hub.learner.models.process", ("torch", "transformers", "peft", "safetensors")),
        (
            "echo_hub.config.objective_defaults, echo_hub.evaluation.evaluator, echo_hub.verify.verifier,"
            "echo_hub.sinks.chosen",
            ("torch", "transformers", "peft", "tensorflow", "wandb"),
        ),
    ],
)
def test_starting_a_program_loads_no_engine(modules: str, absent: tuple[str, ...]) -> None:
    script = f"import {modules}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert sorted(set(run.stdout.split()) & set(absent)) == []


@pytest.mark.parametrize("folder", ["serving", "driving", "intake", "training", "distribution", "oversight"])
def test_no_lambda_of_the_services_reads_an_attribute_later(folder: str) -> None:
    """If a lambda reads an attribute of `self` only when it is called, readers cannot see which object it calls. So
    objects must be passed instead.
    """
    found = []
    for module in modules_of(f"echo_hub.{folder}"):
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.Lambda)):
            if any(isinstance(each, ast.Name) and each.id == "self" for each in ast.walk(node.body)):
                found.append(f"{module}, line {node.lineno}")
    assert found == []


def test_callables_are_parameters_of_few_functions() -> None:
    """A method call on a parameter can be followed to its code; a call of a Callable cannot."""
    assert sum(map(num_callables, MODULES)) <= MOST_CALLABLES


def test_each_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def num_callables(module: str) -> int:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    names = {"Callable"}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and mentions(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    given = [each for one in functions for each in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)]
    return sum(each.annotation is not None and mentions(each.annotation, names) for each in given)


def mentions(tree: ast.AST, names: set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(tree))


def test_every_test_has_its_module() -> None:
    """tests/<package>/<path>/test_<module>.py tests <package>.<path>.<module>; other folders mirror those of the root.

    Further test files of a module are named test_<module>_<aspect>.py. Tests without a module are in tests/ or in
    tests/end_to_end/.
    """
    orphans = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = path.relative_to(ROOT / "tests")
        top, *folders = relative.parts[:-1] or ("",)
        words = path.stem.removeprefix("test_").split("_")
        names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        folder = PACKAGES.get(top, ROOT / top).joinpath(*folders)
        found = any((folder / name).is_dir() or any(folder.glob(f"{name}.*")) for name in names)
        if top not in ("", "end_to_end") and not found:
            orphans.append(str(relative))
    assert orphans == []
