"""Tests the program `outside`, which measures the accuracy of exported models without importing Echo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real import outside

SCRIPT = Path(outside.__file__)


def test_it_imports_nothing_of_echo() -> None:
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith(("echo_", "benchmarks", "torch"))]


def test_the_last_number_of_an_answer_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def answer(messages: list[outside.Message]) -> str:
        asked.append(messages)
        return {"What is 1 + 1?": "1 + 1 = 2", "What is 2 + 2?": "4 or 5", "What is 3 + 3?": ""}[
            messages[-1]["content"].removesuffix(" Briefly.")
        ]

    monkeypatch.setattr(outside, "of_llama_cpp", lambda model, max_tokens: answer)
    monkeypatch.setattr(outside, "modules", lambda: [])
    problems = tmp_path / "problems.json"
    pairs = [("What is 1 + 1?", "2"), ("What is 2 + 2?", "4"), ("What is 3 + 3?", "6")]
    for system_prompt in ("", "Be right."):
        document = {"system_prompt": system_prompt, "prompt_suffix": " Briefly.", "max_tokens": 5, "problems": pairs}
        problems.write_text(json.dumps(document))
        outside.main("llama_cpp", "model", str(problems))
        assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(1 / 3)
    user = {"role": "user", "content": "What is 1 + 1? Briefly."}
    assert asked[0] == [user] and asked[3] == [{"role": "system", "content": "Be right."}, user]
