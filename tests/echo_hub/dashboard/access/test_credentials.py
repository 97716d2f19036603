from __future__ import annotations

import asyncio
import stat
import sys
import threading
from pathlib import Path

import pytest

from echo_hub.dashboard.access.credentials import (
    LEAST_CHARACTERS,
    MOST_CHARACTERS,
    MOST_WAITING,
    BusyError,
    OperatorCredentials,
    set_password,
)
from echo_shared.errors import ConfigError

PASSWORD = "correct horse battery staple"


def credentials(root: Path) -> OperatorCredentials:
    opened = OperatorCredentials(token=root / "operator.token", password=root / "operator.password")
    opened.open()
    return opened


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    first = credentials(tmp_path)
    assert len(first.token) >= 43 and credentials(tmp_path).token == first.token
    assert first.is_token(first.token)
    assert not any(first.is_token(wrong) for wrong in ("", first.token[:-1], first.token + "x", "\udcff", "é"))
    if sys.platform != "win32":
        assert mode(tmp_path / "operator.token") == 0o600


def test_a_rotated_token_is_another_and_in_the_file(tmp_path: Path) -> None:
    shown = credentials(tmp_path)
    before = shown.token
    shown.rotate_token()
    assert not shown.is_token(before) and credentials(tmp_path).is_token(shown.token)
    if sys.platform != "win32":
        assert mode(tmp_path / "operator.token") == 0o600


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 60])
def test_an_invalid_token_is_reported_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "operator.token").write_bytes(content)
    with pytest.raises(ConfigError, match="operator's token"):
        credentials(tmp_path)


async def test_only_a_passwords_hash_is_stored(tmp_path: Path) -> None:
    shown = credentials(tmp_path)
    assert not shown.has_password and not await shown.is_password(PASSWORD)
    set_password(tmp_path / "operator.password", PASSWORD)
    kept = (tmp_path / "operator.password").read_text()
    assert kept.startswith("$argon2id$v=19$m=19456,t=2,p=1$") and PASSWORD not in kept
    if sys.platform != "win32":
        assert mode(tmp_path / "operator.password") == 0o600
    assert shown.has_password
    assert await shown.is_password(PASSWORD)
    assert not await shown.is_password(PASSWORD + " ")
    assert not await shown.is_password("x" * (MOST_CHARACTERS + 1))
    before = shown.password_set_at
    set_password(tmp_path / "operator.password", PASSWORD[::-1])
    assert shown.password_set_at != before
    assert not await shown.is_password(PASSWORD) and await shown.is_password(PASSWORD[::-1])


@pytest.mark.parametrize("length", [0, LEAST_CHARACTERS - 1, MOST_CHARACTERS + 1])
def test_a_password_has_a_length(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=f"{length} characters"):
        set_password(tmp_path / "operator.password", "x" * length)
    assert not (tmp_path / "operator.password").exists()


async def test_a_password_file_without_a_hash_admits_no_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "operator.password").write_text(PASSWORD)
    assert not await credentials(tmp_path).is_password(PASSWORD)
    assert "echo-hub password" in caplog.text and PASSWORD not in caplog.text


async def test_few_passwords_wait_and_the_loop_for_none(tmp_path: Path) -> None:
    set_password(tmp_path / "operator.password", PASSWORD)
    shown = credentials(tmp_path)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    asked = [shown.is_password(PASSWORD) for _ in range(MOST_WAITING + 3)]
    before = set(threading.enumerate())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    turning.cancel()
    assert len(set(threading.enumerate()) - before) == 1, "each thread would hold the memory that a hash needs"
    assert answers[:MOST_WAITING] == [True] * MOST_WAITING
    assert [type(answer) for answer in answers[MOST_WAITING:]] == [BusyError] * 3
    assert turns > 100, "the event loop ran while the passwords were verified"
