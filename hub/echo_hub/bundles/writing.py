"""Write a run as a bundle that strangers can check: `echo_hub.bundles.layout`. Works while a hub serves the run.

All reads of the database see the state of one commit. Memory does not grow with the run: groups are read and written in
parts.

These data are left out because they are private: names and ids of nodes, network addresses, times of single rollouts,
texts of errors, paths on this machine, and every secret setting. A node's pseudonym is a hash of its id under the hub's
secret key, equal in all bundles of this hub. Nodes recognise their own work by the rollout ids of their receipts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

import echo_shared
from echo_hub.bundles.base_files import naming_files, sha256
from echo_hub.bundles.blocks import NO_PLACE, BlockWriter, BundledGroup, BundledRollout
from echo_hub.bundles.layout import (
    CHECKPOINTS,
    NODES,
    RUN,
    STEPS,
    BundleFile,
    BundleManifest,
    adapter_path,
    block_path,
    checkpoint_path,
    sign,
)
from echo_hub.bundles.layout import MANIFEST as MANIFEST_NAME
from echo_hub.bundles.open_settings import open_settings
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID, EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import ADAPTER, read_start
from echo_hub.scoring.problems import Problems
from echo_hub.store.actions import read_settings
from echo_hub.store.browsing import read_tokens
from echo_hub.store.bulk import key_of
from echo_hub.store.database import read_meta
from echo_hub.store.keeping import read_kept_totals
from echo_hub.store.reports import read_accounting
from echo_hub.store.store import Store
from echo_hub.store.whole_run import (
    StoredGroupFacts,
    read_batch_ids,
    read_engines,
    read_evaluation_groups_after,
    read_groups_after,
    read_leases_of_groups,
    read_step_facts,
)
from echo_hub.views.live import stored_settings
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE
from echo_shared.errors import ConfigError
from echo_shared.files.atomic import atomic_directory
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.step_figures import FITTED_TOKENS, LEARNING_RATE
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity
from echo_shared.signing.signed_document import moment
from echo_shared.wire.messages import Checked, DropReason, ReceiptState

GROUPS_AT_ONCE: Final = 64
STEPS_AT_ONCE: Final = 200
_STEPS_REMEMBERED: Final = 8
_COPIED_BYTES: Final = 1 << 20
_CHECKPOINT_MARKER: Final = "checkpoint.json"
_CHECKPOINT_FILES: Final = (WEIGHTS_FILE, CONFIG_FILE, "optimizer.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBundle:
    """What a new bundle contains."""

    rollouts: int
    without_tokens: int
    """Number of received rollouts that the bundle holds without tokens, because the hub has deleted the tokens."""
    steps: int
    nodes: int
    versions: tuple[int, ...]
    """Policy versions whose adapters are in the bundle."""
    missing_versions: tuple[int, ...]
    """Versions with rollouts in the bundle, but without adapters: the hub has already deleted these."""
    size_bytes: int
    public_key: bytes
    step: int | None
    """Step that a checker can repeat with this bundle; None if there is none."""


def write_bundle(
    directory: RunDirectory, destination: Path, *, step: int | None = None, named: Collection[str] = ()
) -> WrittenBundle:
    """Write the run to the new directory `destination`.

    `step` is a training step that a checker can repeat, because the bundle then includes the previous checkpoint.
    `named` are the ids of nodes whose owners agreed to publish their names. Raises ConfigError if there is nothing to
    bundle, and StorageError.
    """
    directory.check()
    if destination.exists():
        raise ConfigError("The destination exists already.", got=str(destination), do="Name a new directory.")
    config = load_config(directory.config, {})
    hub = key_file.load(directory.key)
    with store_of(directory) as store, store.one_look():
        writer = _Writer(directory, config, store, hub, named=frozenset(named))
        again = None if step is None else writer.repeatable(step)
        with atomic_directory(destination) as unfinished:
            return writer.write(_Files(unfinished), again)


def pseudonym(node_id: str, hub: Identity) -> str:
    """Return the name of a node in all bundles of this hub. The node cannot be found from it without the hub's secret
    key."""
    if node_id == HUB_NODE_ID:
        return HUB_NODE_ID
    key = hashlib.blake2b(hub.seed, digest_size=32, person=b"echo bundle").digest()
    return hashlib.blake2b(node_id.encode(), digest_size=8, key=key).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatableStep:
    """The data that a stranger needs to repeat a step, in addition to the step's batch."""

    step: int
    learning_rate: float
    objective: str
    """Objective of the step, as JSON."""
    micro_batch_tokens: int
    gradient_checkpointing: bool
    has_checkpoint: bool
    """False for the first step, which begins with the bare base model."""
    precision: str
    """Precision of the computation: float32 or bfloat16."""
    machine: str
    """Kind of the machine and libraries that made the bundle: see `echo_hub.learner.machine`."""


class _Files:
    """The files of an unfinished bundle, hashed while they are written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[BundleFile] = []

    def add(self, path: str, content: bytes) -> None:
        target = self._target(path)
        target.write_bytes(content)
        self._note(path, len(content), hashlib.sha256(content).hexdigest())

    def add_lines(self, path: str, lines: Iterator[Mapping[str, Any]]) -> int:
        """Write one JSON object a line, and return the number of lines."""
        digest, size, count = hashlib.sha256(), 0, 0
        with self._target(path).open("wb") as file:
            for line in lines:
                content = f"{json.dumps(line, ensure_ascii=False, allow_nan=False)}\n".encode()
                file.write(content)
                digest.update(content)
                size += len(content)
                count += 1
        self._note(path, size, digest.hexdigest())
        return count

    def add_copy(self, path: str, source: Path) -> None:
        """Copy a file. Raises FileNotFoundError if the file was deleted."""
        digest, size = hashlib.sha256(), 0
        with source.open("rb") as given, self._target(path).open("wb") as file:
            while part := given.read(_COPIED_BYTES):
                file.write(part)
                digest.update(part)
                size += len(part)
        self._note(path, size, digest.hexdigest())

    def drop(self, kept: int) -> None:
        """Delete all but the first `kept` files."""
        for file in self.files[kept:]:
            (self.root / file.path).unlink()
        del self.files[kept:]

    def _target(self, path: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _note(self, path: str, size: int, sha256: str) -> None:
        self.files.append(BundleFile(path=path, size_bytes=size, sha256=sha256))


@dataclass(slots=True)
class _Counts:
    rollouts: int = 0
    without_tokens: int = 0
    nodes: set[str] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)


class _Writer:
    def __init__(
        self, directory: RunDirectory, config: HubConfig, store: Store, hub: Identity, *, named: frozenset[str]
    ) -> None:
        self._directory = directory
        self._config = config
        self._store = store
        self._hub = hub
        self._named = named
        self._base_dir = resolve_base(config.model.base)
        self._problems = Problems.of_run(
            config, PromptCodec.of_run(config, self._base_dir), base_dir=self._base_dir, run_dir=directory.root
        )
        self._places: OrderedDict[int, dict[tuple[int, int], int]] = OrderedDict()
        self._pseudonyms: dict[str, str] = {}
        self._counts = _Counts()

    def repeatable(self, step: int) -> RepeatableStep:
        """Return the data that are needed to repeat a step. Raises ConfigError if the step cannot be repeated."""
        facts = self._store.read(read_step_facts, step - 1, 1)
        start = read_start(self._directory)
        first = 1 if start is None else start.policy_version + 1
        possible = [one + 1 for one in self._checkpoints()]
        if not facts or facts[0].step != step or not (step in possible or (step == first and start is None)):
            there_are = ", ".join(map(str, possible)) or "none"
            raise ConfigError(
                "This step cannot be repeated: it is not trained, or the checkpoint before it is deleted.",
                got=f"--step {step}; the steps after a kept checkpoint are: {there_are}",
                do="Name one of these. learner.checkpoints_kept and checkpoint_milestones say which checkpoints stay.",
            )
        if not self._config.learner.deterministic:
            raise ConfigError(
                "This run's steps do not give the same bits again.",
                got="learner.deterministic = false",
                do="Leave --step out.",
            )
        # Import these modules only for a step, because they load torch.
        from echo_hub.learner.machine import computing_precision, machine_digest

        metrics = facts[0].metrics
        return RepeatableStep(
            step=step,
            learning_rate=metrics[LEARNING_RATE.key],
            objective=stored_settings(self._config, self._store.read(read_settings)).objective_of(step),
            micro_batch_tokens=int(metrics.get(FITTED_TOKENS.key, self._config.learner.tokens_at_once)),
            gradient_checkpointing=self._checkpointing(step),
            has_checkpoint=step in possible,
            precision=computing_precision(self._config.learner),
            machine=machine_digest(self._config.learner.device),
        )

    def _checkpoints(self) -> list[int]:
        found = (self._directory.root / CHECKPOINTS).glob(f"step-*/{_CHECKPOINT_MARKER}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def _checkpointing(self, step: int) -> bool:
        """Return True if the step used gradient checkpointing (its backward pass recomputed the layers), as the learner
        recorded."""
        try:
            said = json.loads((self._directory.root / CHECKPOINTS / "micro-batches.json").read_bytes())["cuts"]
        except FileNotFoundError:
            return self._config.learner.gradient_checkpointing is True
        known = [int(first) for first in said if int(first) <= step]
        return bool(said[str(max(known))]["gradient_checkpointing"]) if known else False

    def write(self, files: _Files, again: RepeatableStep | None) -> WrittenBundle:
        for number, block in enumerate(self._blocks(), start=1):
            files.add(block_path(number), block)
        if again is not None:
            # Repeating compares version K with the new adapter, and version K - 1 with the checkpoint.
            self._counts.versions |= {again.step - 1, again.step}
        versions = self._copy_adapters(files)
        if again is not None and again.has_checkpoint:
            self._copy_checkpoint(files, again.step - 1)
        num_steps = files.add_lines(STEPS, self._steps())
        files.add_lines(NODES, self._nodes(versions))
        files.add(RUN, json.dumps(self._run(versions, again), indent=1, ensure_ascii=False, allow_nan=False).encode())
        manifest = BundleManifest(
            hub_key=self._hub.public_key.hex(),
            run_id=self._store.read(read_meta).get("run_id", ""),
            run_name=self._config.run.name,
            made_at=moment(time.time()),
            software=echo_shared.__version__,
            files=tuple(files.files),
        )
        (files.root / MANIFEST_NAME).write_bytes(sign(manifest, self._hub))
        return WrittenBundle(
            rollouts=self._counts.rollouts,
            without_tokens=self._counts.without_tokens,
            steps=num_steps,
            nodes=len(self._counts.nodes),
            versions=versions,
            missing_versions=tuple(sorted(self._counts.versions - {0, *versions})),
            size_bytes=sum(file.size_bytes for file in files.files),
            public_key=self._hub.public_key,
            step=None if again is None else again.step,
        )

    def _blocks(self) -> Iterator[bytes]:
        block = BlockWriter()
        for facts in self._groups():
            for group in self._bundled(facts):
                yield from block.add(group)
        if rest := block.rest():
            yield rest

    def _groups(self) -> Iterator[list[StoredGroupFacts]]:
        """Yield all groups in parts: first training groups by id, then groups of evaluations."""
        after = -1
        while part := self._store.read(read_groups_after, after, GROUPS_AT_ONCE):
            yield part
            after = part[-1].group_id
        after, run_seed = FIRST_EVALUATION_ID - 1, self._config.run.seed
        while ids := self._store.read(read_evaluation_groups_after, after, GROUPS_AT_ONCE):
            abouts = map(EvaluationGroup.of, ids)
            yield [
                StoredGroupFacts(group_id=group_id, seed=evaluation_seed(run_seed, about.number), step=None)
                for group_id, about in zip(ids, abouts, strict=True)
                if about is not None
            ]
            after = ids[-1]

    def _bundled(self, groups: Sequence[StoredGroupFacts]) -> Iterator[BundledGroup]:
        rows: dict[int, list[Any]] = {}
        for row in self._store.read(read_leases_of_groups, [group.group_id for group in groups]):
            rows.setdefault(row.group_id, []).append(row)
        keys = [(row.lease_id, row.at) for of_group in rows.values() for row in of_group]
        tokens = self._store.read(read_tokens, keys)
        for group in groups:
            if group.group_id not in rows:
                continue  # Nothing was leased yet, or the rows are retired.
            places = {} if group.step is None else self._places_of(group.step)
            rollouts = tuple(
                self._rollout(row, tokens.get((row.lease_id, row.at)), places) for row in rows[group.group_id]
            )
            yield BundledGroup(
                group_id=group.group_id,
                seed=group.seed,
                step=group.step,
                prompt_ids=self._problems.prompt_ids(group.group_id),
                rollouts=rollouts,
            )

    def _rollout(
        self, row: Any, payload: RolloutPayload | None, places: Mapping[tuple[int, int], int]
    ) -> BundledRollout:
        node = self._pseudonym(row.node_id)
        counts = self._counts
        counts.rollouts += 1
        counts.nodes.add(row.node_id)
        counts.without_tokens += row.num_tokens is not None and payload is None
        if payload is not None:
            payload = payload.attributed(row.node_id, row.policy_version)
            counts.versions |= {span.policy_version for span in payload.spans}
            drawn_by = {span.node_id for span in payload.spans}
            counts.nodes |= drawn_by
            payload = _renamed(payload, {node_id: self._pseudonym(node_id) for node_id in drawn_by})
        return BundledRollout(
            lease_id=row.lease_id,
            index=row.at,
            turn=row.turn,
            node=node,
            policy_version=row.policy_version,
            state=ReceiptState(row.state),
            drop_reason=None if row.drop_reason is None else DropReason(row.drop_reason),
            checked=Checked(row.checked),
            reward=row.reward,
            turn_reward=row.turn_reward,
            num_tokens=row.num_tokens,
            place=places.get((row.lease_id, row.at), NO_PLACE),
            payload=payload,
        )

    def _places_of(self, step: int) -> dict[tuple[int, int], int]:
        """Return the places of a step's rollouts in the step's batch, by (lease id, index)."""
        found = self._places.pop(step, None)
        if found is None:
            names = self._store.read(read_batch_ids, step)
            found = {key_of(name): place for place, name in enumerate(names)}
        self._places[step] = found
        if len(self._places) > _STEPS_REMEMBERED:
            self._places.popitem(last=False)
        return found

    def _pseudonym(self, node_id: str) -> str:
        if node_id not in self._pseudonyms:
            self._pseudonyms[node_id] = pseudonym(node_id, self._hub)
        return self._pseudonyms[node_id]

    def _copy_adapters(self, files: _Files) -> tuple[int, ...]:
        """Copy the existing adapters of all versions that drew rollouts. Return these versions."""
        start = read_start(self._directory)
        if start is not None:
            self._counts.versions.add(start.policy_version)
        found = []
        for version in sorted(self._counts.versions - {0}):
            source = self._directory.adapter(version)
            if start is not None and version == start.policy_version and not source.exists():
                source = self._directory.start / ADAPTER
            before = len(files.files)
            try:
                for name in (CONFIG_FILE, WEIGHTS_FILE):
                    files.add_copy(f"{adapter_path(version)}/{name}", source / name)
            except FileNotFoundError:  # A hub deletes old adapters, perhaps at this moment.
                files.drop(before)
                continue
            found.append(version)
        return tuple(found)

    def _copy_checkpoint(self, files: _Files, step: int) -> None:
        """Copy a checkpoint, without the recorded results of its steps: the repeated step does not need them."""
        source, path = self._directory.checkpoint(step), checkpoint_path(step)
        try:
            for name in _CHECKPOINT_FILES:
                files.add_copy(f"{path}/{name}", source / name)
            said = json.loads((source / _CHECKPOINT_MARKER).read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(
                "The checkpoint before the step was deleted meanwhile.",
                got=str(error),
                do="Bundle a newer step, or set learner.checkpoint_milestones.",
            ) from error
        kept = {name: value for name, value in said.items() if name not in ("told", "metrics", "earlier", "files")}
        sizes = {name: (files.root / path / name).stat().st_size for name in _CHECKPOINT_FILES}
        marker = {**kept, "told": [], "files": sizes}
        files.add(f"{path}/{_CHECKPOINT_MARKER}", json.dumps(marker).encode())

    def _steps(self) -> Iterator[dict[str, Any]]:
        after = 0
        while part := self._store.read(read_step_facts, after, STEPS_AT_ONCE):
            yield from map(asdict, part)
            after = part[-1].step

    def _nodes(self, versions: Collection[int]) -> Iterator[dict[str, Any]]:
        left = set(self._counts.nodes)
        if HUB_NODE_ID in left:
            left.remove(HUB_NODE_ID)
            yield {"node": HUB_NODE_ID, "numerics": ["torch", self._own_precision(versions), ""], "standing": ""}
        ordered = sorted(left, key=self._pseudonym)
        for start in range(0, len(ordered), STEPS_AT_ONCE):
            ids = ordered[start : start + STEPS_AT_ONCE]
            engines = {one.node_id: one for one in self._store.read(read_engines, ids)}
            for node_id in ids:
                one = engines.get(node_id)
                named = {"name": one.name, "node_id": node_id} if one is not None and node_id in self._named else {}
                yield {
                    "node": self._pseudonym(node_id),
                    "numerics": ["", "", ""] if one is None else list(one.numerics),
                    "standing": "" if one is None else one.standing,
                    **named,
                }

    def _own_precision(self, versions: Collection[int]) -> str:
        """Return the precision in which the hub itself samples. If learner.precision is "auto", the adapters' files
        show it."""
        chosen = self._config.learner.precision
        if chosen == "auto":
            rounded = self._config.dissemination.precision == "auto" and all(map(self._is_float32, versions))
            return "f32" if rounded and versions else "bf16"
        return {"float32": "f32", "bfloat16": "bf16"}[chosen]

    def _is_float32(self, version: int) -> bool:
        try:
            with safe_open(self._directory.adapter(version) / WEIGHTS_FILE, framework="np") as weights:
                return all(weights.get_slice(name).get_dtype() == "F32" for name in weights.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            return False

    def _run(self, versions: Sequence[int], again: RepeatableStep | None) -> dict[str, Any]:
        kept = self._store.read(read_kept_totals)
        base = naming_files(self._config.model.base, self._base_dir)
        start = read_start(self._directory)
        return {
            "settings": open_settings(self._config),
            "judges": sorted(self._config.reward.judges),
            "base": {name: sha256(path) for name, path in sorted(base.items())},
            "content_hash": self._problems.content_hash,
            "started_with": 0 if start is None else start.policy_version,
            "accounting": asdict(self._store.read(read_accounting)),
            "retired": {"rollouts": kept.rollouts_retired, "through_step": kept.retired_step},
            "rollouts": self._counts.rollouts,
            "versions": list(versions),
            "repeatable": None if again is None else asdict(again),
        }


def _renamed(payload: RolloutPayload, pseudonyms: Mapping[str, str]) -> RolloutPayload:
    spans = tuple(replace(span, node_id=pseudonyms[span.node_id]) for span in payload.spans)
    return replace(payload, spans=spans)
