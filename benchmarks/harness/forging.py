"""Change bundles as a forger would: decode a bundle, change it, encode it and sign it again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echo_hub.bundles import layout
from echo_hub.bundles.blocks import BundledGroup, pack_block, unpack_block
from echo_hub.bundles.layout import BundleFile
from echo_shared.signing.identity import Identity

Change = Callable[[BundledGroup], BundledGroup]
"""Function that gets a group of the original bundle and returns the group of the changed bundle."""


def changed(
    bundle: Path,
    out: Path,
    signer: Identity,
    *,
    groups: Change | None = None,
    files: Mapping[str, Callable[[bytes], bytes]] | None = None,
) -> Path:
    """Copy a bundle to `out` with changed groups and files, and sign it."""
    shutil.copytree(bundle, out)
    if groups is not None:
        for path in sorted((out / layout.ROLLOUTS).glob("*.zst")):
            path.write_bytes(pack_block([groups(one) for one in unpack_block(path.read_bytes())]))
    for name, change in (files or {}).items():
        (out / name).write_bytes(change((out / name).read_bytes()))
    said = layout.verified((out / layout.MANIFEST).read_bytes())
    signed = said.model_copy(
        update={
            "hub_key": signer.public_key.hex(),
            "files": tuple(described(out, file.path) for file in said.files),
        }
    )
    (out / layout.MANIFEST).write_bytes(layout.sign(signed, signer))
    return out


def described(root: Path, path: str) -> BundleFile:
    content = (root / path).read_bytes()
    return BundleFile(path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def in_json(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the JSON file `content` after `change`, which modifies its object in place."""
    value = json.loads(content)
    change(value)
    return json.dumps(value).encode()
