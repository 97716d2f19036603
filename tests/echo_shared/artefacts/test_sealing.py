"""Real files are sealed (encrypted) and unsealed. Every change of the sealed bytes is detected."""

from __future__ import annotations

import hashlib
import io
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from echo_shared.artefacts.sealing import (
    CHUNK_BYTES,
    MAGIC,
    SALT_BYTES,
    TAG_BYTES,
    UnsealingReader,
    new_key,
    seal,
    unseal,
)
from echo_shared.errors import CodecError, StorageError

KEY = bytes(range(32))
HEAD = len(MAGIC) + SALT_BYTES
SEALED_CHUNK = CHUNK_BYTES + TAG_BYTES


def sealed(directory: Path, content: bytes, key: bytes = KEY) -> Path:
    (directory / "plain").write_bytes(content)
    seal(directory / "plain", directory / "sealed", key)
    return directory / "sealed"


@pytest.mark.parametrize(
    "size", [0, 1, 1_000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 17]
)
def test_a_sealed_file_unseals_unchanged(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    file = sealed(tmp_path, content)
    chunks = max(1, -(-size // CHUNK_BYTES))
    assert file.stat().st_size == HEAD + size + chunks * TAG_BYTES
    digest = unseal(file, tmp_path / "dir" / "opened", KEY)
    assert digest == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "dir" / "opened").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "sealed", "dir"}, "no temporary file stays"


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(CHUNK_BYTES + 5)
    data = sealed(tmp_path, content).read_bytes()
    salt, body = data[len(MAGIC) : HEAD], data[HEAD:]
    cipher = AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=MAGIC).derive(KEY))
    first = cipher.decrypt(bytes(11) + b"\0", body[:SEALED_CHUNK], None)
    last = cipher.decrypt(bytes(10) + b"\1" + b"\1", body[SEALED_CHUNK:], None)
    assert first + last == content


def test_nothing_of_the_content_can_be_read_and_no_two_sealings_are_alike(tmp_path: Path) -> None:
    words = b"the weights of the adapter; "
    first = sealed(tmp_path, words * 5_000).read_bytes()
    second = sealed(tmp_path, words * 5_000).read_bytes()
    assert words[:8] not in first
    assert first[:HEAD] != second[:HEAD] and first[HEAD : HEAD + 16] != second[HEAD : HEAD + 16]


def test_every_key_is_new() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) == 32


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + SEALED_CHUNK] for at in range(HEAD, len(data), SEALED_CHUNK)]


ATTACKS: dict[str, Callable[[bytes], bytes]] = {
    "nothing at all": lambda data: b"",
    "half a head": lambda data: data[: HEAD // 2],
    "a head alone": lambda data: data[:HEAD],
    "another magic": lambda data: flipped(data, 0),
    "another salt": lambda data: flipped(data, len(MAGIC)),
    "a bit of the first chunk": lambda data: flipped(data, HEAD),
    "a bit of the first tag": lambda data: flipped(data, HEAD + SEALED_CHUNK - 1),
    "a bit of the last chunk": lambda data: flipped(data, len(data) - 1),
    "cut by a byte": lambda data: data[:-1],
    "cut between chunks": lambda data: data[: HEAD + 2 * SEALED_CHUNK],
    "the last chunk alone": lambda data: data[:HEAD] + chunks(data)[2],
    "a chunk left out": lambda data: data[:HEAD] + chunks(data)[0] + chunks(data)[2],
    "two chunks swapped": lambda data: data[:HEAD] + chunks(data)[1] + chunks(data)[0] + chunks(data)[2],
    "a chunk twice": lambda data: data[:HEAD] + chunks(data)[0] + data[HEAD:],
    "a byte more": lambda data: data + b"\0",
    "itself once more": lambda data: data + data[HEAD:],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_cut_reordered_or_changed_file_does_not_unseal(tmp_path: Path, attack: str) -> None:
    file = sealed(tmp_path, random.Random(7).randbytes(2 * CHUNK_BYTES + 100))
    file.write_bytes(ATTACKS[attack](file.read_bytes()))
    (tmp_path / "opened").write_bytes(b"what was there before")
    with pytest.raises(CodecError, match="seal"):
        unseal(file, tmp_path / "opened", KEY)
    assert (tmp_path / "opened").read_bytes() == b"what was there before"
    assert not (tmp_path / "opened.tmp").exists()


def test_a_chunk_of_another_file_under_the_same_key_does_not_fit(tmp_path: Path) -> None:
    content = bytes(2 * CHUNK_BYTES)
    one, other = sealed(tmp_path, content).read_bytes(), sealed(tmp_path, content).read_bytes()
    (tmp_path / "mixed").write_bytes(one[: HEAD + SEALED_CHUNK] + other[HEAD + SEALED_CHUNK :])
    with pytest.raises(CodecError):
        unseal(tmp_path / "mixed", tmp_path / "opened", KEY)


@pytest.mark.parametrize("key", [bytes(32), KEY[::-1], b""])
def test_another_key_opens_nothing(tmp_path: Path, key: bytes) -> None:
    with pytest.raises(CodecError, match="cannot be opened"):
        unseal(sealed(tmp_path, b"content"), tmp_path / "opened", key)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("work", [seal, unseal])
def test_a_missing_source_is_a_storage_error(tmp_path: Path, work: Callable[[Path, Path, bytes], None]) -> None:
    with pytest.raises(StorageError):
        work(tmp_path / "nowhere", tmp_path / "target", KEY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file size there")
def test_a_disk_that_is_full_is_a_storage_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    import resource

    file = sealed(tmp_path, bytes(3 * CHUNK_BYTES))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK_BYTES, limits[1]))
    try:
        with pytest.raises(StorageError):
            seal(tmp_path / "plain", tmp_path / "again", KEY)
        with pytest.raises(StorageError):
            unseal(file, tmp_path / "opened", KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "sealed"}


@pytest.mark.parametrize("size", [0, 5, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
def test_a_reader_gives_the_content_in_parts(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    with sealed(tmp_path, content).open("rb") as file:
        reader = UnsealingReader(file, KEY)
        parts = [reader.read(count) for count in (0, 3, 100_000, CHUNK_BYTES, 7, 4 * CHUNK_BYTES, 1)]
    assert b"".join(parts) == content
    assert parts[-1] == b""


def test_a_reader_notices_at_the_end_that_something_was_cut_off(tmp_path: Path) -> None:
    file = sealed(tmp_path, random.Random(4).randbytes(2 * CHUNK_BYTES))
    reader = UnsealingReader(io.BytesIO(file.read_bytes()[: HEAD + SEALED_CHUNK]), KEY)
    with pytest.raises(CodecError, match="cannot be opened"):
        reader.read(CHUNK_BYTES + 1)
