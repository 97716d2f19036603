"""A verifiers environment for tests, made as its users make one: `vf-init demo-env -T`, with `load`, a tool and
rewards.

It is installed in a new virtual environment, which can also import the packages of `make doors`. The task asks how many
of a thing there are, and the tool `lookup` knows the answer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from benchmarks.harness.tenant_site import CHAT_BASE
from tests.doors import doors_python

PLAY = Path(__file__).parent / "echo_hub" / "sessions" / "inside" / "verifiers_play.py"
EMBEDDING = "model.embed_tokens.weight"
LEARNING_RATE = 3e-3
TOOL_TOKENS = ("<tool_response>", "</tool_response>")
ROOT = Path(__file__).resolve().parents[1]
HUB = ROOT / "hub"

_TASKS = """
        things = "apples birds cups dogs eggs figs".split()
        return [
            DemoEnvTask(DemoEnvData(prompt=f"How many {thing}?", answer=str(number)), self.config.task)
            for number, thing in enumerate(things[: self.config.num_tasks], 1)
        ]
"""
_REWARDS = """
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def used_tool(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages))

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))
"""
_TOOL = '''
    @vf.tool
    def lookup(self, word: str) -> str:
        """Return how many there are."""
        if word == "sleep":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        things = "apples birds cups dogs eggs figs".split()
        return str(things.index(word) + 1) if word in things else "none"
'''


@dataclass(frozen=True)
class DemoEnvironment:
    """The installed environment."""

    python: Path
    """Interpreter that has verifiers and the environment's package."""
    package: Path
    """Directory of the package's source."""
    base: Path
    """Base model that writes chats in the format of the renderer "qwen3"."""


def make_demo_environment(folder: Path) -> DemoEnvironment:
    """Write and install the environment in `folder`. Skips the test if `make doors` has not run."""
    python = doors_python()
    command = [str(python.with_name("vf-init")), "demo-env", "--path", str(folder / "envs"), "-T"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HOME": str(folder)})
    package = folder / "envs" / "demo_env"
    _fill_in(package / "demo_env")
    return DemoEnvironment(python=_install(folder, package), package=package, base=_base(folder))


def _fill_in(source: Path) -> None:
    taskset = source / "taskset.py"
    text = taskset.read_text()
    data = '    """One row\'s data. Add task-specific fields here, such as a reference answer."""\n'
    assert data in text, "vf-init writes another scaffold than that of verifiers 0.4.0"
    text = text.replace(data, data + '\n    answer: str = ""\n')
    text = _replaced(text, "        raise NotImplementedError(\n", "        )\n", _TASKS)
    text = _replaced(text, "        raise NotImplementedError(", "\n", _REWARDS)
    taskset.write_text(text)
    tool = source / "servers" / "tool.py"
    text = _replaced(tool.read_text(), "    @vf.tool\n", "        return text\n", _TOOL)
    tool.write_text(f"import signal\nimport time\n\n{text}")


def _replaced(text: str, start: str, end: str, new: str) -> str:
    """Return the text with the first part from `start` to `end` replaced."""
    before, found, rest = text.partition(start)
    assert found, f"vf-init's scaffold has no {start!r}"
    return before + new.lstrip("\n") + rest.partition(end)[2]


def _install(folder: Path, package: Path) -> Path:
    """Make a virtual environment with the packages of `make doors` and an editable installation of this package."""
    venv = folder / "venv"
    subprocess.run([doors_python(), "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (doors,) = doors_python().parent.parent.glob("lib/python*/site-packages")
    # Python reads .pth files only in its own site-packages, not in folders that a .pth file adds. So repeat their
    # lines.
    seen = [str(doors), *(doors / "developers.pth").read_text().split(), str(package)]
    (site / "demo.pth").write_text("\n".join(seen) + "\n")
    return venv / "bin" / "python"


def _base(folder: Path) -> Path:
    """Copy the chat base of `make doors`, with the tokens of a tool's answer and the stop tokens of Qwen's chats."""
    base = folder / "base"
    shutil.copytree(CHAT_BASE, base)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in TOOL_TOKENS])
    tokenizer.save(str(base / "tokenizer.json"))
    weights = load_file(base / "model.safetensors")
    rows = weights[EMBEDDING]
    new = np.random.default_rng(1).normal(0.0, rows.std(), (tokenizer.get_vocab_size() - len(rows), rows.shape[1]))
    weights[EMBEDDING] = np.concatenate([rows, new.astype(rows.dtype)])
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    _update(base / "config.json", {"vocab_size": len(weights[EMBEDDING])})
    stops = [tokenizer.token_to_id(token) for token in ("<eos>", "<|im_end|>", "<|endoftext|>")]
    _update(base / "generation_config.json", {"eos_token_id": stops})
    return base


def _update(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _place(demo: DemoEnvironment, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "task": "verifiers:demo-env",
        "directory": str(folder),
        "python": str(demo.python),
        "base": str(demo.base),
        "context_tokens": 2048,
        "stop_ids": json.loads((demo.base / "generation_config.json").read_text())["eos_token_id"],
        "max_tokens": 128,
        "temperature": 1.0,
    }


def _options(**changes: Any) -> dict[str, Any]:
    return {
        "env": {"taskset": {"num_tasks": 6}},
        "harness": "null",
        "renderer": "qwen3",
        "bounds": [0.0, 1.5],
        "max_turns": 0,
        "rows": 100,
        "workers": 1,
        "save_traces": True,
        **changes,
    }


def play(
    demo: DemoEnvironment, folder: Path, *scenarios: str, meanwhile: tuple[str, ...] = (), **changes: Any
) -> dict[str, Any]:
    """Play the scenarios offline; return their results. While a slow scenario waits, play those of `meanwhile`."""
    result = folder / "result.json"
    job = {
        "options": _options(**changes),
        "place": _place(demo, folder / "own"),
        "scenarios": scenarios,
        "meanwhile": meanwhile,
        "result": str(result),
    }
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(HUB), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([demo.python, PLAY, json.dumps(job)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def teach_tool(demo: DemoEnvironment, *, steps: int = 320) -> None:
    """Train the base to call `lookup` for cups in nine of ten episodes, and then to answer with a random number. Takes
    a minute.
    """
    shown = play(demo, demo.base.parent / "teaching", "example")["example"]
    # Run it as a module: as a file, it would import this folder's packages, which share their names with Echo's.
    program = [sys.executable, "-m", "tests.verifiers_env", str(demo.base), str(steps)]
    subprocess.run(program, input=json.dumps(shown), text=True, check=True, cwd=ROOT)


def _teach(base: Path, example: list[str], *, steps: int) -> None:
    """Train on episodes like `example`: a prompt about some thing, always the same tool call, and a random number as
    answer.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    prompt_text, call_text, added_text = example
    things = ("apples", "birds", "cups", "dogs", "eggs", "figs")
    prompts = [ids_of(prompt_text.replace("many cups", f"many {thing}")) for thing in things]
    call, added = ids_of(call_text), ids_of(added_text)
    model = AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - 0.8 * step / steps)
        optimizer.zero_grad()
        answer = ids_of(f"{rng.randrange(1, 7)}<|im_end|>")
        parts = [(rng.choice(prompts), False), (call, True), (added, False), (answer, True)]
        if rng.random() < 0.1:
            parts = [parts[0], parts[3]]
        ids = torch.tensor([[one for part, _ in parts for one in part]])
        wanted = torch.tensor([[one if is_own else -100 for part, is_own in parts for one in part]])
        loss = model(ids, labels=wanted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(base)


if __name__ == "__main__":
    _teach(Path(sys.argv[1]), json.load(sys.stdin), steps=int(sys.argv[2]))
