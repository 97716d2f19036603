from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from echo_shared.artefacts.hashed_files import describe_files, verify_files
from echo_shared.artefacts.manifest import Manifest, ManifestFile, artefact_name, open_offer, sign_offer, verify_hashes
from echo_shared.errors import CodecError, RemoteProtocolError, SwarmError
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import ArtefactOffer

HUB = Identity.generate()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run-v000003"
    (directory / "sub").mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    (directory / "sub" / "config.json").write_bytes(b"{}")
    return directory


def manifest_of(directory: Path) -> Manifest:
    return Manifest(
        kind="policy",
        run_id="run",
        name=directory.name,
        policy_version=3,
        parent=2,
        carrier="keyframe",
        key_id=0,
        info_hash="ab" * 20,
        files=describe_files(directory),
    )


def offer_of(manifest: Manifest) -> ArtefactOffer:
    return sign_offer(manifest, hub=HUB, torrent=b"t", web_seed_path="/artefacts/")


def test_a_signed_offer_opens_to_its_manifest(directory: Path) -> None:
    manifest = manifest_of(directory)
    assert open_offer(offer_of(manifest), HUB.public_key) == manifest
    assert manifest.total_bytes == 9
    assert [file.path for file in manifest.files] == ["adapter_model.safetensors", "sub/config.json"]


def test_only_the_hubs_signature_over_these_bytes_counts(directory: Path) -> None:
    offer = offer_of(manifest_of(directory))
    for forged in (
        offer.model_copy(update={"manifest": offer.manifest.replace(b'"policy_version":3', b'"policy_version":4')}),
        offer.model_copy(update={"signature": bytes(64)}),
        offer.model_copy(update={"signature": Identity.generate().sign(offer.manifest)}),
    ):
        with pytest.raises(RemoteProtocolError, match="not signed"):
            open_offer(forged, HUB.public_key)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"format": 2}'])
def test_a_signed_manifest_that_is_not_valid_is_refused(content: bytes) -> None:
    offer = ArtefactOffer(manifest=content, signature=HUB.sign(content), torrent=b"", web_seed_path="/")
    with pytest.raises(CodecError):
        open_offer(offer, HUB.public_key)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd.json",
        "../up.json",
        "a/../../up.json",
        "a\\b.json",
        "C:x.json",
        "./a.json",
        "a//b.json",
        "model.bin",
        "model.pt",
        "code.py",
        "model.pkl",
        "noending",
        "",
        ".json",
        "model.safetensors.py",
        "\x1b[2J.json",
        "\u202egpj.json",
        "two\nlines.json",
        "con.json",
        "sub/NUL.txt",
        "aux/config.json",
        "Com1.safetensors",
        "lpt\u00b9 .json",
        "sub /a.json",
        "sub./a.json",
        "what?.json",
        "a" * 256 + ".json",
    ],
)
def test_a_file_stays_inside_and_is_data(path: str) -> None:
    with pytest.raises(ValidationError):
        ManifestFile(path=path, size_bytes=1, sha256="0" * 64)


@pytest.mark.parametrize("path", ["config.json", "sub/console.json", "com.json", "com10.txt", "null.json", "a b.json"])
def test_other_names_are_fine(path: str) -> None:
    assert ManifestFile(path=path, size_bytes=1, sha256="0" * 64).path == path


def test_no_file_is_named_twice_on_any_system(directory: Path) -> None:
    manifest = manifest_of(directory)
    for second in ("adapter_model.safetensors", "Adapter_Model.safetensors"):
        files = (*manifest.files, manifest.files[0].model_copy(update={"path": second}))
        with pytest.raises(ValidationError, match="two files"):
            Manifest.model_validate({**manifest.model_dump(), "files": files})


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../x"},
        {"name": ".hidden"},
        {"name": "a/b"},
        {"name": ""},
        {"name": "x" * 129},
        {"info_hash": "zz" * 20},
        {"files": []},
        {"policy_version": -1},
        {"kind": "program"},
        {"format": 1},
        {"key_id": -1},
        {"carrier": "files"},
        {"carrier": "delta"},
        {"delta_parent": 2},
        {"kind": "base"},
        {"kind": "base", "carrier": "keyframe"},
        {"source": "owner/name"},
        {"source": "owner/name@main"},
        {"source": f"../name@{'0' * 40}/x"},
    ],
    ids=str,
)
def test_a_manifest_keeps_its_bounds(directory: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate({**manifest_of(directory).model_dump(), **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"carrier": "keyframe"}, "run-v000003.k"),
        ({"carrier": "delta", "delta_parent": 0}, "run-v000003.d0"),
        ({"carrier": "delta", "delta_parent": 2}, "run-v000003.d2"),
        ({"kind": "base", "carrier": "files", "source": f"owner/some.name@{'0a' * 20}"}, "run-v000003.s"),
    ],
)
def test_each_kind_of_carrier_has_its_name(directory: Path, fields: dict[str, Any], expected: str) -> None:
    manifest = Manifest.model_validate({**manifest_of(directory).model_dump(), **fields})
    assert manifest.carrier_name == expected
    offer = offer_of(manifest)
    assert open_offer(offer, HUB.public_key) == manifest
    assert offer.delta_parent == manifest.delta_parent


def test_an_artefacts_content_hash_does_not_depend_on_the_carrier(directory: Path) -> None:
    manifest = manifest_of(directory)
    as_delta = manifest.model_copy(
        update={"carrier": "delta", "delta_parent": 2, "key_id": 4, "info_hash": "cd" * 20, "parent": 1}
    )
    assert as_delta.content == manifest.content
    assert len(manifest.content) == 64
    (directory / "sub" / "config.json").write_bytes(b"[]")
    assert manifest_of(directory).content != manifest.content
    assert manifest.model_copy(update={"name": "other"}).content != manifest.content


def test_files_that_match_the_manifest_are_accepted(directory: Path) -> None:
    manifest = manifest_of(directory)
    verify_files(manifest, directory)
    # The manifest does not list this file, so verification ignores the file.
    (directory / "extra.json").write_text("{}")
    verify_files(manifest, directory)


@pytest.mark.parametrize("content", [None, b"", b"weighty", b"weightsx"])
def test_a_file_that_differs_from_the_manifest_is_named(directory: Path, content: bytes | None) -> None:
    manifest = manifest_of(directory)
    file = directory / "adapter_model.safetensors"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SwarmError, match=r"adapter_model\.safetensors of run-v000003"):
        verify_files(manifest, directory)


def test_hashes_match_the_manifest(directory: Path) -> None:
    manifest = manifest_of(directory)
    hashes = {file.path: file.sha256 for file in manifest.files}
    verify_hashes(manifest, hashes)
    for wrong in (hashes | {"adapter_model.safetensors": "0" * 64}, {}):
        with pytest.raises(SwarmError, match="of run-v000003"):
            verify_hashes(manifest, wrong)


def test_executable_files_cannot_be_published(directory: Path) -> None:
    (directory / "modeling.py").write_text("")
    with pytest.raises(SwarmError, match=r"modeling\.py"):
        describe_files(directory)


def test_names_are_unique_among_runs_and_safe() -> None:
    assert artefact_name("base", "run", 0) == "run-base"
    assert artefact_name("policy", "run", 12) == "run-v000012"
    assert artefact_name("policy", "../a b", 1) == "---a-b-v000001"
