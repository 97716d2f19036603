"""Deltas between the directories of two versions. Hostile payloads, and payloads for another parent, are refused."""

from __future__ import annotations

import hashlib
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from echo_shared import delta
from echo_shared.delta import encode
from echo_shared.delta.frames import MAX_CONTENT_BYTES
from echo_shared.delta.versions import MAGIC
from echo_shared.errors import CodecError, StorageError

WEIGHTS = "adapter_model.safetensors"
CONFIG = json.dumps({"peft_type": "LORA", "r": 16, "target_modules": [f"layer{n}_proj" for n in range(30)]}).encode()


def version(directory: Path, seed: int, *, rate: float = 0.0, size: int = 3000, **extra: torch.Tensor) -> Path:
    """Save an adapter with tensors of all dtypes, whose weights differ from those of seed 0 by about `rate`."""
    torch.manual_seed(0)
    start = torch.randn(size, 5) * 0.02
    torch.manual_seed(seed)
    tensors = {
        name: (start + rate * torch.randn(size, 5)).to(dtype)
        for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.float16), ("d", torch.bfloat16))
    }
    directory.mkdir(exist_ok=True)
    save_file({**tensors, **extra}, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / "adapter_config.json").write_bytes(CONFIG)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def sizes(directory: Path) -> dict[str, int]:
    return {name: len(content) for name, content in contents(directory).items()}


def decode(payload: Path, directory: Path, *, files: dict[str, int], parent: Path | None = None) -> None:
    with payload.open("rb") as stream:
        hashes = delta.decode(stream, directory, files=files, parent=parent)
    assert hashes == {name: hashlib.sha256(content).hexdigest() for name, content in contents(directory).items()}


def there_and_back(directory: Path, scratch: Path, parent: Path | None) -> int:
    payload = scratch / "payload"
    encode(directory, payload, parent=parent)
    decode(payload, scratch / "decoded", files=sizes(directory), parent=parent)
    assert contents(scratch / "decoded") == contents(directory)
    assert not list(scratch.glob("*.tmp"))
    return payload.stat().st_size


def test_a_keyframe_is_smaller_than_the_files_and_a_delta_smaller_still(tmp_path: Path) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2, rate=1e-5)
    raw = sum(map(len, contents(new).values()))
    keyframe = there_and_back(new, tmp_path, None)
    delta = there_and_back(new, tmp_path, old)
    same = there_and_back(old, tmp_path, old)
    assert same < 0.02 * raw
    assert delta < 0.6 * keyframe
    assert keyframe < 0.9 * raw


def test_tensors_that_the_parent_lacks_are_coded_on_their_own(tmp_path: Path) -> None:
    old = version(tmp_path / "old", 1, gone=torch.zeros(7), shape=torch.ones(4, 6), dtype=torch.ones(9))
    new = version(
        tmp_path / "new",
        2,
        rate=1e-4,
        empty=torch.zeros(0, 4),
        scalar=torch.tensor(float("nan")),
        shape=torch.ones(6, 4),
        dtype=torch.ones(9).bfloat16(),
    )
    (new / "more.txt").write_text("not in the parent")
    (new / "empty.json").touch()
    there_and_back(new, tmp_path, old)
    there_and_back(new, tmp_path, None)


def test_files_larger_than_a_chunk_decode_unchanged(tmp_path: Path) -> None:
    elements = MAX_CONTENT_BYTES // 2 + 12_345
    weights = torch.arange(elements, dtype=torch.float32).sin()
    old, new = (
        version(tmp_path / name, seed, large=(weights * (1 + 1e-4 * seed)).bfloat16(), single=weights)
        for seed, name in enumerate(("old", "new"))
    )
    (new / "tokenizer.json").write_bytes(np.random.default_rng(1).bytes(MAX_CONTENT_BYTES + 1))
    there_and_back(new, tmp_path, old)


def write_safetensors(path: Path, header: Any, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}} | {"y": {"dtype": "F32"}}, bytes(4)),
        (
            {
                "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            bytes(8),
        ),
        ({}, b""),
        ([], b""),
    ],
    ids=["dtype", "hole", "bytes behind", "entry", "overlap", "none", "list"],
)
def test_files_that_only_look_like_safetensors_decode_unchanged(header: Any, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    write_safetensors(tmp_path / "odd" / WEIGHTS, header, data)
    there_and_back(tmp_path / "odd", tmp_path, None)
    there_and_back(tmp_path / "odd", tmp_path, version(tmp_path / "parent", 1))
    there_and_back(version(tmp_path / "new", 2), tmp_path, tmp_path / "odd")


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=6),
    dtypes=st.lists(st.sampled_from(["F32", "F16", "BF16"]), min_size=6, max_size=6),
    padding=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_any_tensors_of_any_bits_decode_unchanged(
    shapes: list[list[int]], dtypes: list[str], padding: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(seed)
    for name in ("old", "new"):
        header: dict[str, Any] = {}
        end = 0
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False)):
            begin, end = end, end + int(np.prod(shape)) * (4 if dtype == "F32" else 2)
            header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        header["__metadata__"] = {"padding": " " * padding}
        (scratch / name).mkdir()
        write_safetensors(scratch / name / WEIGHTS, header, rng.bytes(end))
    there_and_back(scratch / "new", scratch, scratch / "old")


def test_a_delta_needs_its_parent(tmp_path: Path) -> None:
    old, new = version(tmp_path / "old", 1), version(tmp_path / "new", 2, rate=1e-4)
    payload = tmp_path / "payload"
    with pytest.raises(CodecError, match="without its parent"):
        encode(new, payload, parent=tmp_path / "nowhere")
    encode(new, payload, parent=old)
    with pytest.raises(CodecError, match="without its parent"):
        decode(payload, tmp_path / "a", files=sizes(new))
    with pytest.raises(CodecError, match="without its parent"):
        decode(payload, tmp_path / "a", files=sizes(new), parent=tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    others = [
        tmp_path / "bare",
        version(tmp_path / "shapes", 1, size=2999),
        version(tmp_path / "names", 1, e=torch.ones(3)),
        version(tmp_path / "values", 3, rate=0.1),
    ]
    for other in others:
        with pytest.raises(CodecError, match="another parent"):
            decode(payload, tmp_path / "a", files=sizes(new), parent=other)


def test_a_keyframe_looks_at_no_parent(tmp_path: Path) -> None:
    new = version(tmp_path / "new", 2)
    encode(new, tmp_path / "payload")
    decode(tmp_path / "payload", tmp_path / "decoded", files=sizes(new), parent=tmp_path / "nowhere")
    assert contents(tmp_path / "decoded") == contents(new)


def test_a_directory_that_is_no_version_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for name, make in {
        "folder": lambda at: (at / "sub").mkdir(),
        "name": lambda at: (at / "ä.json").touch(),
        "many": lambda at: [(at / f"{number}.json").touch() for number in range(257)],
    }.items():
        directory = tmp_path / name
        directory.mkdir()
        make(directory)  # type: ignore[no-untyped-call]
        with pytest.raises(CodecError):
            encode(directory, tmp_path / "payload")
    with pytest.raises(StorageError, match="read or written"):
        encode(tmp_path / "nowhere", tmp_path / "payload")
    with pytest.raises(StorageError):
        encode(version(tmp_path / "new", 1), tmp_path / "nowhere" / "payload")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    directory = version(tmp_path / "new", 1)
    try:
        (directory / "link.json").symlink_to(tmp_path / "elsewhere")
    except OSError:
        pytest.skip("no symbolic links here")
    with pytest.raises(CodecError):
        encode(directory, tmp_path / "payload")


def test_other_files_than_were_announced_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    new = version(tmp_path / "new", 1)
    expected = sizes(new)
    encode(new, tmp_path / "payload")
    for files in (
        {},
        {**expected, WEIGHTS: expected[WEIGHTS] - 1},
        {**expected, "more.json": 2},
        {WEIGHTS: expected[WEIGHTS]},
    ):
        with pytest.raises(CodecError, match="payload") as caught:
            decode(tmp_path / "payload", tmp_path / "decoded", files=files)
        assert "other files" in str(caught.value)
    assert not (tmp_path / "decoded").exists()


def payload_of(index: object, rest: bytes = b"") -> bytes:
    encoded = index if isinstance(index, bytes) else json.dumps(index).encode()
    return MAGIC + struct.pack("<I", len(encoded)) + encoded + rest


def entry(**changes: object) -> dict[str, object]:
    return {"name": "x.json", "size_bytes": 0, "header_bytes": 0, **changes}


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"no JSON",
        b"[" * 50_000,
        b"[]",
        {"delta": False},
        {"delta": 0, "files": []},
        {"delta": False, "files": [], "more": 1},
        {"delta": False, "files": [entry()] * 2},
        {"delta": False, "files": [entry(), entry(name="X.json")]},
        {"delta": False, "files": [entry(name=f"{number}") for number in range(257)]},
        {"delta": False, "files": [entry(size_bytes=1 << 70)]},
        {"delta": False, "files": [entry(size_bytes=1 << 60)] * 16},
        {"delta": False, "files": [entry(size_bytes=-1)]},
        {"delta": False, "files": [entry(size_bytes=1.0)]},
        {"delta": False, "files": [entry(size_bytes=7, header_bytes=8)]},
        {"delta": False, "files": [entry(size_bytes=1 << 30, header_bytes=(8 << 20) + 1)]},
        *(
            {"delta": False, "files": [entry(name=name)]}
            for name in ("", ".", "..", "../x", "/x", "a/b", "a\\b", "C:x", "x\n", "x\0", ".x", "x" * 129, "ä")
        ),
    ],
)
def test_a_hostile_index_is_refused_and_writes_nothing(index: object, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(payload_of({"delta": False, "files": [entry()]}))
    decode(tmp_path / "payload", tmp_path / "good", files={"x.json": 0})
    (tmp_path / "payload").write_bytes(payload_of(index))
    entries: Any = index.get("files", []) if isinstance(index, dict) else []
    announced = {one["name"]: one["size_bytes"] for one in entries}
    with pytest.raises(CodecError):
        decode(tmp_path / "payload", tmp_path / "bad", files=announced)
    assert not (tmp_path / "bad").exists()


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    good = payload_of({"delta": False, "files": []})
    for content in (b"", MAGIC, good[:-1], good + b"\0", b"\0" + good, MAGIC + b"\xff\xff\xff\xff" + good):
        (tmp_path / "payload").write_bytes(content)
        with pytest.raises(CodecError):
            decode(tmp_path / "payload", tmp_path / "decoded", files={})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), against_parent=st.booleans())
def test_damage_gives_files_within_the_bound_or_a_codec_error(
    data: st.DataObject, against_parent: bool, tmp_path: Path
) -> None:
    old, new = version(tmp_path / "old", 1, size=400), version(tmp_path / "new", 2, rate=1e-3, size=400)
    parent = old if against_parent else None
    encode(new, tmp_path / "payload", parent=parent)
    content = bytearray((tmp_path / "payload").read_bytes())
    # Half of the damaged bytes are near the start, where the payload describes its content.
    places = st.one_of(st.integers(0, 400), st.integers(0, len(content) - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4)):
        content[place] = value
    (tmp_path / "payload").write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 1, 300]))])
    with suppress(CodecError):
        decode(tmp_path / "payload", tmp_path / "decoded", files=sizes(new), parent=parent)
    assert {path.name for path in tmp_path.iterdir()} <= {"old", "new", "payload", "decoded"}
