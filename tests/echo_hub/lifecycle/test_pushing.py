"""huggingface_hub's real client uploads to a local server. The real service is not reached here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.echo_hub.model_hub_endpoint import ModelHub, model_hub

REPO = "ada/sums"


@pytest.fixture
def hub() -> Iterator[ModelHub]:
    with model_hub() as served:
        yield served


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlibrary_name: gguf\n---\n\n# sums\n")
    (folder / "config.json").write_text("{}")
    for number in range(2):
        (folder / f"part{number}.gguf").write_bytes(bytes([number]) * 5_000)
    return folder


def push(hub: ModelHub, folder: Path, *options: str, **changed: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "echo_hub", "push", str(folder), REPO, *options],
        env={**hub.environment, **changed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_directory_is_uploaded_to_a_new_private_repository(hub: ModelHub, exported: Path) -> None:
    status, said = push(hub, exported)
    assert status == 0, said
    assert f"Uploaded to {hub.url}/{REPO}" in said
    assert hub.private == {REPO: True}
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}


def test_a_public_repository_needs_to_be_asked_for(hub: ModelHub, exported: Path) -> None:
    hub.private[REPO] = False
    status, said = push(hub, exported)
    assert status == 1 and "This repository is public" in said and "--public" in said and not hub.files
    assert push(hub, exported, "--public")[0] == 0 and hub.files
    hub.private.clear()
    assert push(hub, exported, "--public")[0] == 0 and hub.private == {REPO: False}


def test_an_interrupted_upload_continues(hub: ModelHub, exported: Path) -> None:
    hub.refused = {"/commit/": 403}
    status, said = push(hub, exported)
    assert status == 1 and "HTTP 403" in said and f"Then continue: echo-hub push {exported} {REPO}" in said
    assert hub.uploads == 2 and not hub.files
    hub.refused = {}
    assert push(hub, exported)[0] == 0
    assert hub.uploads == 2 and len(hub.files) == 4, "finished files are not sent again"


def test_a_wrong_token_is_explained(hub: ModelHub, exported: Path) -> None:
    status, said = push(hub, exported, HF_TOKEN="hf_other")
    assert status == 1 and "HTTP 401" in said and "hf auth login" in said


def test_a_hub_that_does_not_answer_is_explained(hub: ModelHub, exported: Path) -> None:
    status, said = push(hub, exported, HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 1 and "did not finish" in said and "Then continue" in said


def test_only_exports_are_uploaded(hub: ModelHub, tmp_path: Path) -> None:
    status, said = push(hub, tmp_path)
    assert status == 1 and "no model card" in said
