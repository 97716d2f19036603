from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from echo_hub.bundles import layout
from echo_hub.bundles.layout import BundleFile, BundleManifest
from echo_shared.errors import CodecError
from echo_shared.signing.identity import Identity

HUB = Identity.from_seed(bytes(range(32)))
FILE = BundleFile(path=layout.block_path(1), size_bytes=3, sha256="0" * 64)
SAID = BundleManifest(
    hub_key=HUB.public_key.hex(),
    run_id="r",
    run_name="A run",
    made_at="2026-01-01T00:00:00Z",
    software="1",
    files=(FILE,),
)


def test_a_signed_manifest_is_read_as_it_was_written() -> None:
    assert layout.verified(layout.sign(SAID, HUB)) == SAID


@pytest.mark.parametrize(
    "change",
    [
        {"run_name": "Another run"},
        {"files": []},
        {"hub_key": Identity.from_seed(bytes(32)).public_key.hex()},
        {"format": 2},
    ],
)
def test_a_changed_manifest_is_refused(change: dict[str, Any]) -> None:
    document = json.loads(layout.sign(SAID, HUB))
    document["bundle"] |= change
    with pytest.raises(CodecError):
        layout.verified(json.dumps(document).encode())


def test_another_kind_of_signed_document_is_no_manifest() -> None:
    document = json.loads(layout.sign(SAID, HUB))
    canonical = json.dumps(document["bundle"], sort_keys=True, separators=(",", ":")).encode()
    document["signature"] = HUB.sign(b"echo certificate 1\0" + canonical).hex()
    with pytest.raises(CodecError, match="signature is wrong"):
        layout.verified(json.dumps(document).encode())


@pytest.mark.parametrize(
    "path",
    [
        *("run.json", "nodes.jsonl", "steps.jsonl", "rollouts/000001.zst", "adapters/v000012/adapter_config.json"),
        *("adapters/v1000000/adapter_model.safetensors", "checkpoints/step-000003/optimizer.safetensors"),
    ],
)
def test_files_of_a_bundle(path: str) -> None:
    assert BundleFile(path=path, size_bytes=1, sha256="0" * 64).path == path


@pytest.mark.parametrize(
    "path",
    [
        *("../run.json", "/etc/passwd", "rollouts/../../x.zst", "rollouts/000001.pkl", "adapters/v000001/model.bin"),
        *("rollouts\\000001.zst", "runxjson", "run.json\n", "", "manifest.json", "adapters/v000001/x/../a.safetensors"),
    ],
)
def test_no_other_path_is_in_a_bundle(path: str) -> None:
    with pytest.raises(ValidationError):
        BundleFile(path=path, size_bytes=1, sha256="0" * 64)
