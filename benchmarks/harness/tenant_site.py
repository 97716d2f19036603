"""Start a hub without a task, its nodes, and programs of its tenants (users of its API) as processes on this machine.

`make doors` builds an environment for the clients' libraries: the tinker SDK, its cookbook, and verifiers. They need
other versions of some packages than Echo does. Packages that the environment lacks, for example torch, come from the
developers' environment.

The cookbook's recipes load tokenizers and datasets by name. They run offline in a folder (`client_folder`) that has
directories with these names, which hold a small base's tokenizer and a few problems.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.live_site import LOOK_S, LiveSite, Running, ServedRun
from benchmarks.harness.site import RunFailed

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path(os.environ.get("ECHO_DOORS", ROOT / "build" / "doors"))
CLIENTS_PYTHON: Final = FOLDER / "bin" / "python"
"""Python interpreter of the environment with the clients' libraries."""
CHAT_BASE: Final = FOLDER / "chat-base"
"""A small base model that answers chats (`scripts.ci.chat_base` makes it)."""
ALIAS: Final = "Qwen/Qwen3-8B"
"""Name under which clients see the served base. The cookbook must know this model."""
MODELS: Final = "echo_hub.learner.models.serve"
VERIFIER: Final = "echo_hub.verify.worker"
WITHIN_S: Final = 600.0


def lacking() -> str:
    """Return why this machine cannot run tenants' programs; "" if it can."""
    return "" if CLIENTS_PYTHON.exists() else "no build/doors: run `make doors`"


def client_folder(folder: Path, base: Path) -> Path:
    """Make a folder in which recipes find this base's tokenizer as `ALIAS`, and the datasets gsm8k and no_robots.

    This gsm8k has only six sums up to 4, so that a few steps of RL raise the reward far more than chance does.
    """
    tokenizer = folder / ALIAS
    tokenizer.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tokenizer)
    sums = [(left, right) for left in range(1, 9) for right in range(1, 9) if left + right < 10]
    problems = [{"question": f"{left}+{right}?", "answer": f"#### {left + right}"} for left, right in sums]
    small = [problem for problem, (left, right) in zip(problems, sums, strict=True) if left + right <= 4]
    _dataset(folder / "openai" / "gsm8k", "main", small * 24)
    chats = [
        {
            "messages": [
                {"role": "user", "content": one["question"]},
                {"role": "assistant", "content": one["answer"][5:]},
            ]
        }
        for one in problems
    ]
    _dataset(folder / "HuggingFaceH4" / "no_robots", "default", chats * 5)
    return folder


def _dataset(folder: Path, config: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))


class TenantSite(ServedRun):
    """A hub without a task that serves tenants under `ALIAS`, its nodes, and the programs of its tenants."""

    def __init__(self, site: LiveSite) -> None:
        super().__init__(site)
        self.base = CHAT_BASE
        self.folder = client_folder(site.root / "client", self.base)
        self._keys: dict[str, str] = {}

    async def open(self, *, drawn_by: str = "hub", **settings: dict[str, object]) -> None:
        """Make the run and start its hub. `drawn_by`: `hub` or `nodes` draw the tenants' samples. `settings` adds or
        changes sections of the configuration.
        """
        sections: dict[str, dict[str, object]] = {
            "task": {"name": "none"},
            "model": {"base": str(self.base)},
            "tinker": {"enabled": True},
            "openai": {"enabled": True},
            "tenants": {"drawn_by": drawn_by, "device": "cpu"},
        }
        merged = {name: {**sections.get(name, {}), **settings.get(name, {})} for name in sections | settings}
        self.run = await self.site.make_run("tenants", **merged)
        config = self.run / "config.toml"
        config.write_text(re.sub(r"(?m)^aliases = .*$", f'aliases = {{"{ALIAS}" = "base"}}', config.read_text()))
        await self.serve()

    async def key(self, name: str = "ada") -> str:
        """Return the API token of the tenant `name`, in the form that clients of the Tinker API send. The first call
        makes the tenant.
        """
        if name in self._keys:
            return self._keys[name]
        status, text = await self.site.command("echo_hub.main", "act", self.run, "token", name, "use")
        found = re.search(r"TINKER_API_KEY=(\S+)", text)
        if status != 0 or found is None:
            raise RunFailed(text)
        self._keys[name] = found[1]
        return found[1]

    async def program(self, key: str, *command: object, url: str = "", env: Mapping[str, str] | None = None) -> Running:
        """Start the clients' Python with these arguments, in the folder that has the tokenizer and the datasets."""
        environment = {
            **os.environ,
            "TINKER_BASE_URL": url or f"{self.url}/tinker",
            "TINKER_API_KEY": key,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.site.root / "cache"),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        return await self.site.program(CLIENTS_PYTHON, *map(str, command), env=environment, cwd=self.folder)

    async def recipe(
        self, key: str, name: str, folder: str, *, before: tuple[object, ...] = ("-m",), **options: object
    ) -> Running:
        """Start a recipe of the cookbook, which logs to `folder`. `before` are the arguments before the recipe's
        module.
        """
        given = {"base_url": f"{self.url}/tinker", "model_name": ALIAS, "log_path": folder, **options}
        module = f"tinker_cookbook.recipes.{name}"
        return await self.program(key, *before, module, *(f"{option}={value}" for option, value in given.items()))

    def metrics(self, folder: str) -> list[dict[str, Any]]:
        """Return the metrics that a recipe has logged so far, one record per step."""
        file = self.folder / folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    async def logged(self, folder: str, least: int, recipe: Running) -> None:
        """Wait until a recipe has logged `least` steps. Raises RunFailed if it ends first."""
        give_up_at = time.monotonic() + WITHIN_S
        while len(self.metrics(folder)) < least:
            if recipe.process.returncode is not None:
                raise RunFailed((await recipe.ended())[1][-4_000:])
            if time.monotonic() > give_up_at:
                raise RunFailed(f"{len(self.metrics(folder))} of {least} steps in {WITHIN_S:.0f} s")
            await asyncio.sleep(LOOK_S)

    def final_weights(self, tenant: str) -> list[dict[str, bytes]]:
        """Return the files of each training checkpoint that a tenant's recipes saved as "final", oldest first."""
        query = "SELECT directory FROM tenant_checkpoints WHERE tenant_id = ? AND path LIKE '%/weights/final'"
        folders = [self.run / directory for (directory,) in self.rows(f"{query} ORDER BY made_at", tenant)]
        return [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]

    async def kill_module(self, module: str) -> None:
        """Kill the hub's child process that runs this module."""
        await self.kill_child(lambda child: module in child.cmdline())


async def found(program: Running) -> dict[str, Any]:
    """Wait until a program ends. Return the JSON object of its last line; {} if the line is not JSON. Raises RunFailed
    if the program failed.
    """
    status, text = await program.ended(within_s=WITHIN_S)
    if status != 0:
        raise RunFailed(f"a tenant's program ended with status {status}: {text[-4_000:]}")
    last = text.rstrip().rpartition("\n")[2]
    answer: dict[str, Any] = json.loads(last) if last.startswith("{") else {}
    return answer
