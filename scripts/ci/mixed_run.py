"""A run of a hub and a node with different Pythons and libraries, with prompts and completions that fill large frames.

    python -m scripts.ci.mixed_run PYTHON [--backend NAME] [--steps N]

The hub uses this Python, the node uses PYTHON; both run this checkout's code. Prompts have more than 4,096 tokens and
completions 2,060, so leases and rollouts exceed 16 KiB. From this size on, the codec decodes field by field. The exit
status is 0 if the run finishes and both sides have read frames of this size, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from echo_hub.run.base_files import resolve_base
from scripts.ci.counted import REFUSED

POSITIONS: Final = 8_192
"""Context length of the run's base model in tokens. The built-in base declares 256, but its rotary embedding allows
more.
"""
PROMPT_CHARACTERS: Final = 4_200
"""Characters of a prompt, each of which is one token of the base's tokenizer."""
PROBLEMS: Final = 32
HUB_SETTINGS: Final = {
    "TASK__NAME": "jsonl",
    "SAMPLING__MAX_TOKENS": "2060",
    "TRAINING__GROUPS_PER_STEP": "1",
    "TRAINING__GROUP_SIZE": "2",
    "EVALUATION__PROBLEMS": "1",
    "LEARNER__THREADS": "1",
    "DISSEMINATION__WAY": "swarm",
    "SERVER__SHARED_MEMORY": "false",
}
NODE_SETTINGS: Final = {"ECHO_NODE_BENCH_SECONDS": "0", "ECHO_NODE_MANNERS__PRIORITY": "normal"}
READY_S: Final = 120.0
RUN_S: Final = 240.0
END_S: Final = 30.0
PADDING, PADDING_ID = "<pad>", 0


def main() -> None:
    """Run the test; print how many large frames each side (hub and node) has read. Raises SystemExit with the fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", metavar="PYTHON")
    parser.add_argument("--backend", default="mlx")
    parser.add_argument("--steps", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="echo-mixed-run-") as temporary, ExitStack() as stack:
        mixed_run(asked.python, asked.backend, asked.steps, Path(temporary), stack)


def mixed_run(python: str, backend: str, steps: int, directory: Path, stack: ExitStack) -> None:
    """Run hub and node in `directory`; closing `stack` ends both processes."""
    run, port = directory / "run", free_port()
    of_hub = {f"ECHO_HUB_{name}": value for name, value in HUB_SETTINGS.items()} | {
        "ECHO_HUB_MODEL__BASE": str(make_base(directory / "base")),
        "ECHO_HUB_TASK__OPTIONS": json.dumps(
            {"path": str(make_problems(directory / "problems.jsonl")), "answer": "exact"}
        ),
    }
    flags = ["--port", str(port), "--steps", str(steps)]
    subprocess.run(
        [sys.executable, "-m", "echo_hub", "init", str(run), *flags],
        env=os.environ | of_hub,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    hub = begin(stack, directory / "hub", sys.executable, of_hub, "echo_hub", "serve", str(run), "--port", str(port))
    until_answering(hub, port)
    of_node = {**NODE_SETTINGS, "ECHO_NODE_HOME": str(directory / "home")}
    join = ["join", f"http://127.0.0.1:{port}", "--backend", backend, "--name", "other"]
    began_at = time.monotonic()
    node = begin(stack, directory / "node", python, of_node, "echo_node", *join)
    trained = 0
    while trained < steps:
        if node.poll() is not None or time.monotonic() > began_at + RUN_S:
            failed(directory, f"{trained} of {steps} steps after {RUN_S:.0f} s, or the node has ended ({node.poll()})")
        time.sleep(0.5)
        trained = steps_trained(run / "echo.db")
    node.terminate()
    if (status := node.wait(END_S)) != 0:
        failed(directory, f"the node ended with status {status}")
    read = {side: json.loads((directory / f"{side}.json").read_text(encoding="utf-8")) for side in ("hub", "node")}
    print(f"{trained} of {steps} steps in {time.monotonic() - began_at:.0f} s; frames over 16 KiB: {json.dumps(read)}")
    if not read["node"].get("lease") or not read["hub"].get("rollout"):
        failed(directory, "no lease or no rollout filled a large frame")
    if refused := [text for counts in read.values() for text in counts if text.startswith(REFUSED)]:
        failed(directory, "; ".join(refused))


def steps_trained(database: Path) -> int:
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=10)) as store:
        return int(store.execute("SELECT count(*) FROM steps WHERE trained_at IS NOT NULL").fetchone()[0])


def make_base(directory: Path) -> Path:
    """Copy the built-in base, with more positions and a stop token that it never produces."""
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"max_position_embeddings": POSITIONS, "eos_token_id": PADDING_ID},
        "generation_config.json": {"eos_token_id": PADDING_ID},
        "tokenizer_config.json": {"model_max_length": POSITIONS, "eos_token": PADDING},
    }
    for name, changed in changes.items():
        settings = json.loads((directory / name).read_text(encoding="utf-8"))
        (directory / name).write_text(json.dumps({**settings, **changed}), encoding="utf-8")
    return directory


def make_problems(file: Path) -> Path:
    """Write sums, each after thousands of random characters that make the prompt long."""
    rng = random.Random(1)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(PROBLEMS):
            a, b = rng.randrange(100), rng.randrange(100)
            noise = "".join(rng.choices("0123456789+= ", k=PROMPT_CHARACTERS))
            lines.write(json.dumps({"prompt": f"{noise}{a}+{b}=", "answer": str(a + b)}) + "\n")
    return file


def begin(
    stack: ExitStack, stem: Path, python: str, settings: dict[str, str], program: str, *arguments: str
) -> subprocess.Popen[bytes]:
    """Start a program of Echo with the interpreter `python`. It writes counts of its large frames to `stem`.json (see
    `counted`), and its log to `stem`.log.
    """
    log = stack.enter_context(stem.with_suffix(".log").open("wb"))
    command = [python, "-m", "scripts.ci.counted", str(stem.with_suffix(".json")), program, *arguments]
    process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(end, process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def until_answering(hub: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the hub's port is open. Raises SystemExit if the hub ends first or takes too long."""
    give_up_at = time.monotonic() + READY_S
    while time.monotonic() < give_up_at and hub.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    sys.exit(f"the hub does not answer (status {hub.poll()})")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def failed(directory: Path, what: str) -> None:
    """Print the end of both logs (hub's and node's). Raises SystemExit with the text `what`."""
    for log in sorted(directory.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(encoding='utf-8', errors='replace')[-3_000:]}", file=sys.stderr)
    sys.exit(f"mixed run: {what}")


if __name__ == "__main__":
    main()
