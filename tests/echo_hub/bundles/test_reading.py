from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.forging import changed
from echo_hub.bundles import layout
from echo_hub.bundles.reading import Bundle
from echo_shared.errors import CodecError
from echo_shared.signing.identity import Identity
from tests.echo_hub.bundles.conftest import STEPS

STRANGER = Identity.from_seed(bytes(32))


def test_a_bundle_gives_back_its_run(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert list(opened.faults()) == []
    run = opened.run()
    assert [step.step for step in opened.steps()] == [1, 2, 3]
    assert [(node.node, node.numerics) for node in opened.nodes()] == [("hub", ("torch", "f32", ""))]
    groups = [group for block in opened.groups() for group in block]
    assert sum(len(group.rollouts) for group in groups) == run.rollouts >= STEPS * 24
    assert set(opened.adapters) == set(run.versions) == {1, 2, 3}
    assert set(opened.checkpoints) == {STEPS - 1}


@pytest.mark.parametrize("name", ["steps.jsonl", "rollouts/000001.zst", "adapters/v000002/adapter_model.safetensors"])
def test_a_changed_byte_is_found(bundle: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    opened = Bundle.open(copy)
    assert [(fault.path, "differs" in fault.fault) for fault in opened.faults()] == [(name, True)]
    with pytest.raises(CodecError, match="not the one that the hub signed"):
        (list(opened.steps()), list(opened.groups()), opened._read(name, 2**30))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(("change", "text"), [(longer, "another size"), (linked, "is a link"), (os.unlink, "missing")])
def test_files_of_another_kind_are_refused(
    bundle: Path, tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    change(copy / "run.json")
    opened = Bundle.open(copy)
    assert [fault.path for fault in opened.faults()] == ["run.json"]
    with pytest.raises(CodecError, match=text):
        opened.run()


def test_a_directory_that_links_elsewhere_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    (copy / "rollouts").rename(tmp_path / "rollouts")
    (copy / "rollouts").symlink_to(tmp_path / "rollouts")
    with pytest.raises(CodecError, match="is a link"):
        list(Bundle.open(copy).groups())


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("run.json", b"{", "not JSON"),
        ("run.json", b'{"settings": {}}', "base"),
        ("run.json", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nests"),
        ("nodes.jsonl", b'{"node": "a", "numerics": ["torch"]}\n', "line 1"),
        ("nodes.jsonl", b'{"node": NaN}\n', "NaN"),
        ("steps.jsonl", b'{"step": 0}\n', "step"),
        ("steps.jsonl", b" " * (layout.LINE_BYTES + 2), "too long"),
        ("rollouts/000001.zst", b"nothing", "000001.zst"),
    ],
)
def test_signed_nonsense_is_refused(bundle: Path, tmp_path: Path, name: str, content: bytes, text: str) -> None:
    copy = changed(bundle, tmp_path / "copy", STRANGER, files={name: lambda _: content})
    opened = Bundle.open(copy)
    assert list(opened.faults()) == []
    with pytest.raises(CodecError, match=text):
        (opened.run(), list(opened.nodes()), list(opened.steps()), list(opened.groups()))


def test_what_is_no_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="This is not a bundle"):
        Bundle.open(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"[]")
    with pytest.raises(CodecError, match="no bundle's manifest"):
        Bundle.open(tmp_path)
    said = layout.verified((bundle / "manifest.json").read_bytes())
    signed = said.model_copy(update={"hub_key": STRANGER.public_key.hex(), "files": (*said.files, said.files[0])})
    (tmp_path / "manifest.json").write_bytes(layout.sign(signed, STRANGER))
    with pytest.raises(CodecError, match="twice"):
        Bundle.open(tmp_path)
    without = said.model_copy(update={"hub_key": STRANGER.public_key.hex(), "files": ()})
    (tmp_path / "manifest.json").write_bytes(layout.sign(without, STRANGER))
    with pytest.raises(CodecError, match="lacks a file"):
        Bundle.open(tmp_path)
