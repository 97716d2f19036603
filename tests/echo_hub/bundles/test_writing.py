from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import zstandard

from echo_hub.bundles.reading import Bundle
from echo_hub.bundles.writing import pseudonym, write_bundle
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.keeping import Keeping
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity
from tests.echo_hub.bundles.conftest import STEPS
from tests.echo_hub.written_steps import train
from tests.test_declared_secrets import SAID, SECRETS

HOME = "home-of-the-operator"


def plain_files(bundle: Path) -> dict[str, bytes]:
    """Return every file of a bundle as plain text, by its path."""
    files = [path for path in bundle.rglob("*") if path.is_file()]
    assert len(files) >= 5
    return {
        str(path.relative_to(bundle)): zstandard.decompress(path.read_bytes())
        if path.suffix == ".zst"
        else path.read_bytes()
        for path in files
    }


@pytest.fixture
def written(tmp_path: Path) -> RunDirectory:
    """Return a run with secret settings and two written steps of one node."""
    directory = RunDirectory(tmp_path / HOME / "run")
    secrets = {name: value for name, value in SECRETS.items() if name != "store"}
    make_run(directory, load_config(None, {**secrets, "training": {"group_size": 2}}))
    store = Store.open(directory.database_url)
    store.node_seen(
        node_id="a", public_key=b"k" * 32, name="Ada's laptop", backend="torch", device="Ada's GPU", now=1.0
    )
    for step in (1, 2):
        train(store, step)
    store.close()
    return directory


def test_nothing_private_is_in_a_bundle(written: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    write_bundle(written, out)
    hub = key_file.load(written.key)
    hidden = [text.encode() for text in (*SAID, "Ada", HOME, str(tmp_path), (b"k" * 32).hex())]
    hidden += [hub.to_pem(), hub.seed, hub.seed.hex().encode()]
    found = plain_files(out)
    assert [(name, text) for name, content in found.items() for text in hidden if text in content] == []
    (node,) = Bundle.open(out).nodes()
    assert (node.node, node.numerics, node.name) == (pseudonym("a", hub), ("torch", "", ""), "")


def test_a_node_is_named_only_on_request(written: RunDirectory, tmp_path: Path) -> None:
    write_bundle(written, tmp_path / "bundle", named=["a"])
    (line,) = (tmp_path / "bundle" / "nodes.jsonl").read_text().splitlines()
    assert json.loads(line)["name"] == "Ada's laptop" and json.loads(line)["node_id"] == "a"


def test_pseudonyms_differ_between_hubs_and_lead_to_no_node() -> None:
    one, other = Identity.from_seed(bytes(32)), Identity.from_seed(bytes(range(32)))
    names = {pseudonym(node, hub) for hub in (one, other) for node in ("a", "b")}
    assert len(names) == 4
    assert pseudonym("a", one) == pseudonym("a", one)
    assert pseudonym("hub", one) == "hub"


def test_tokens_that_the_hub_does_not_keep_are_counted(written: RunDirectory, tmp_path: Path) -> None:
    store = Store.open(written.database_url)
    store.keeping = Keeping(share=0.0)
    store.prune(1)
    store.close()
    report = write_bundle(written, tmp_path / "bundle")
    assert (report.rollouts, report.without_tokens, report.steps, report.nodes) == (6, 2, 2, 1)
    assert report.missing_versions == (1,)
    (groups,) = Bundle.open(tmp_path / "bundle").groups()
    assert [[one.payload is None for one in group.rollouts] for group in groups] == [[True] * 3, [False, False, True]]


def test_a_bundle_is_refused_where_something_is(written: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        write_bundle(written, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_only_a_step_after_a_kept_checkpoint_can_be_named(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be repeated") as refused:
        write_bundle(run, tmp_path / "bundle", step=STEPS + 1)
    assert not (tmp_path / "bundle").exists()
    assert "the steps after a kept checkpoint are: 2, 3, 4" in str(refused.value)


def test_the_checkpoint_of_a_step_tells_no_results(bundle: Path) -> None:
    marker = json.loads((bundle / "checkpoints" / f"step-{STEPS - 1:06d}" / "checkpoint.json").read_bytes())
    assert marker["step"] == STEPS - 1 and marker["told"] == []
    assert {"norms", "files"} <= marker.keys()


def test_an_adapter_that_is_deleted_is_left_out(run: RunDirectory, tmp_path: Path) -> None:
    copy = RunDirectory(tmp_path / "run")
    shutil.copytree(run.root, copy.root)
    (copy.adapter(1) / "adapter_model.safetensors").unlink()
    report = write_bundle(copy, tmp_path / "bundle")
    assert report.versions == (2,) and report.missing_versions == (1,)
    assert list(Bundle.open(tmp_path / "bundle").faults()) == []
