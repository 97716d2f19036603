"""Open a hub's resources in order, check that the database belongs to the run, and close them in reverse order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy import make_url

from echo_hub.config.sections import HubConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.operating import restored
from echo_hub.driving.resources import Resources
from echo_hub.intake.partials import Partials, partials_of
from echo_hub.judges.judges import secrets_of as keys_of_judges
from echo_hub.learner.settings import LearnerSettings
from echo_hub.lifecycle.cluster_of_run import open_cluster
from echo_hub.lifecycle.starting import begin
from echo_hub.net.host_memory import HostMemory
from echo_hub.net.invitations import Invitations
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import Tracker
from echo_hub.operation.log_lines import logged_to_file
from echo_hub.run.base_files import model_hub_source, resolve_base, vocabulary_size
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.experts import experts_in
from echo_hub.run.offered_gguf import OfferedGguf, offered_gguf
from echo_hub.run.start import Start, read_start
from echo_hub.scoring.asked import AskedGroup
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.stop_strings import StopStrings
from echo_hub.serving.core_settings import coordinator_settings, rules_by_task, session_rules, trained_tasks
from echo_hub.serving.hub import Hub
from echo_hub.sessions.host import SessionHost
from echo_hub.store.actions import begin_settings
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import holds_run, read_meta, write_meta
from echo_hub.store.invites import read_came_by, read_invites
from echo_hub.store.keeping import Keeping
from echo_hub.store.known_nodes import read_banned_nodes
from echo_hub.store.reports import read_evaluated_versions
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_hub.tasks.free_rewards import warning_of
from echo_hub.views.live import configured
from echo_shared.errors import DATABASE_AWAY, ConfigError, StorageError
from echo_shared.files.full_disk import Room
from echo_shared.process.abandonable import abandonable
from echo_shared.process.supervised import SupervisedChild
from echo_shared.settings import secrets_of
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity, fingerprint
from echo_shared.swarm import Swarm, SwarmSettings, open_swarm
from echo_shared.wire.codec import check_codec

log = logging.getLogger(__name__)

LEASES_APART: Final = 2**32
"""Maximum number of lease ids that a hub skips at its start (see `apart`)."""

SWITCH_S: Final = 0.0005
"""Thread switch interval in seconds, a tenth of Python's default. Threads that read the database for pages wait for a
thread switch at every row. With the default, such a read took seconds while the event loop was busy."""
AWAY_AT_START_S: Final = 60.0
"""Longest wait of a starting hub for its database server, in seconds. A serving hub waits without limit."""


@asynccontextmanager
async def open_hub(
    config: HubConfig, directory: RunDirectory, *, spawned: SupervisedChild | None = None
) -> AsyncIterator[Hub]:
    """Open a hub and its port; call `Hub.serve` next. `spawned` is the learner's process if it was started earlier
    (`learner.process.begun`). Raises ConfigError and StorageError.

    At the end of the context, all resources are closed in reverse order.
    """
    check_codec()
    sys.setswitchinterval(SWITCH_S)
    async with AsyncExitStack() as stack:
        stack.enter_context(directory.locked())
        secrets_of_run = (*secrets_of(config), *keys_of_judges(config.reward.judges))
        stack.enter_context(logged_to_file(config.log, directory.root, secrets=secrets_of_run))
        me = key_file.load(directory.key)
        base_dir, codec, problems, absence = await abandonable(_opened_task, config, directory.root)
        stack.callback(problems.close)
        gguf = await abandonable(_offered_gguf, config, base_dir, directory)
        room = Room(tell=_say_full)
        server = Room(code=DATABASE_AWAY, tell=_say_away)
        store = AsyncStore(await _opened_store(config, directory), room, server)
        stack.push_async_callback(store.close)
        start = await begin(store, directory, config, base_dir)
        await check_unchanged(store, config, problems.content_hash)
        run = _OpenedRun(
            config=config,
            directory=directory,
            me=me,
            base_dir=base_dir,
            codec=codec,
            problems=problems,
            absence=absence,
            gguf=gguf,
            store=store,
            start=start,
            snapshot=apart(await store.read(read_snapshot)),
        )
        resources = await _opened_resources(stack, run, spawned)
        hub = Hub(resources, _partials_of(resources, run.snapshot))
        await _reopen_publishing(hub, run)
        logging.getLogger("echo_hub").addHandler(hub.operation.event_log)
        stack.callback(logging.getLogger("echo_hub").removeHandler, hub.operation.event_log)
        stack.push_async_callback(hub.connections.fleet.close)
        stack.push_async_callback(hub.trials.close)
        stack.push_async_callback(hub.close)
        await hub.open()
        stack.push_async_callback(hub.server.close)
        yield hub


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedRun:
    """What is read or made first when a hub opens: the run, its task and its database."""

    config: HubConfig
    directory: RunDirectory
    me: Identity
    base_dir: Path
    codec: PromptCodec
    problems: Problems
    absence: str
    """The reason why no problems can be drawn yet; "" if problems are drawn."""
    gguf: OfferedGguf | None
    """The base model's GGUF file for nodes with llama.cpp; None without one."""
    store: AsyncStore
    start: Start | None
    """The adapter or version that the run starts with; None means the base model alone."""
    snapshot: CoordinatorSnapshot


async def _opened_resources(stack: AsyncExitStack, run: _OpenedRun, spawned: SupervisedChild | None) -> Resources:
    """Open everything that the hub's services share. `stack` closes it."""
    config, directory, me, store = run.config, run.directory, run.me, run.store
    problems, codec, base_dir, gguf = run.problems, run.codec, run.base_dir, run.gguf
    swarm = await _opened_swarm(config.server)
    stack.push_async_callback(swarm.close)
    tracker = Tracker(me, public=bool(config.server.public_url))
    run_id = await _run_id(store, me)
    memory = HostMemory(enabled=config.server.shared_memory)
    stack.callback(memory.close)
    stored = await _stored_settings(store, config)
    logs = directory.root / "logs"
    cluster = await stack.enter_async_context(open_cluster(config, base_dir, logs=logs, owner=run_id))
    scoring = await stack.enter_async_context(
        ScoringPool.open(config, problems, base_dir=base_dir, logs=logs, cluster=cluster)
    )
    sessions = None
    if problems.session_tasks:
        sessions = await stack.enter_async_context(SessionHost.open(problems.session_tasks, config.sessions))
        sessions.drawing_waits(run.absence)
    return Resources(
        config=config,
        directory=directory,
        me=me,
        run_id=run_id,
        store=store,
        publisher=Publisher(directory.root, run_id, me, swarm=swarm, tracker=tracker, memory=memory),
        tracker=tracker,
        problems=problems,
        codec=codec,
        scoring=scoring,
        sessions=sessions,
        cluster=cluster,
        bounds=_bounds(config, base_dir, codec),
        learner=LearnerSettings.of_run(
            config, base_dir=base_dir, stop_ids=codec.stop_ids, multi_turn=problems.multi_turn
        ),
        coordinator=_coordinator(
            config, problems, me, stored, run.snapshot, gguf_precision=gguf.precision(run_id) if gguf else ""
        ),
        gguf=gguf,
        invitations=Invitations(await store.read(read_invites), await store.read(read_came_by)),
        started_at=await _started_at(store),
        evaluated=frozenset(await store.read(read_evaluated_versions)),
        spawned=spawned,
        start=run.start,
        answers=run.snapshot.answers,
        answered=run.snapshot.answered,
    )


def _partials_of(resources: Resources, snapshot: CoordinatorSnapshot) -> Partials:
    """Return the unfinished rollouts from before the hub's start."""
    for group in snapshot.answers:
        asked = AskedGroup(prompt_ids=group.prompt_ids, seed=group.seed, sampling=group.sampling)
        resources.asked.add(group.group_id, asked)
    return partials_of(
        resources.group_bounds,
        snapshot.rollouts,
        interrupts=resources.config.training.on_new_version == "interrupt",
        published_version=snapshot.published_version,
    )


async def _reopen_publishing(hub: Hub, run: _OpenedRun) -> None:
    model = run.config.model.base
    from_model_hub = run.config.dissemination.base == "model_hub"
    await hub.publishing.reopen(
        run.base_dir,
        base_source=model_hub_source(model, run.base_dir) if from_model_hub else None,
        base_gguf=run.gguf,
        published_version=run.snapshot.published_version,
        banned=await run.store.read(read_banned_nodes),
    )


def _opened_task(config: HubConfig, run_dir: Path) -> tuple[Path, PromptCodec, Problems, str]:
    """Return the base model's directory, the tokenizer, the problems, and why they cannot be drawn yet ("" if they are
    drawn). Raises ConfigError."""
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    problems = Problems.of_run(config, codec, base_dir=base_dir, run_dir=run_dir)
    if absence := problems.prepare_at_start():
        log.warning("the environment is away; the hub draws its problems later: %s", absence)
    for note in (warning_of(config.task.name), _unchecked(config, problems), *problems.notes()):
        if note:
            log.warning("%s", note)
    return base_dir, codec, problems, absence


def _offered_gguf(config: HubConfig, base_dir: Path, directory: RunDirectory) -> OfferedGguf | None:
    offered = offered_gguf(config.model, base_dir, known=directory.gguf)
    if offered is not None:
        log.info("nodes with llama.cpp get %s (%s)", offered.parts[0].name, offered.weights)
    return offered


def _coordinator(
    config: HubConfig,
    problems: Problems,
    me: Identity,
    stored: Mapping[str, Any],
    snapshot: CoordinatorSnapshot,
    *,
    gguf_precision: str,
) -> Coordinator:
    """Return the coordinator, with the settings of config.toml and the operator's changes (`stored`)."""
    settings = coordinator_settings(
        config,
        multi_turn=problems.multi_turn,
        secret=_secret(me),
        tasks=trained_tasks(problems),
        gguf_precision=gguf_precision,
        session_rules=session_rules(config, problems),
    )
    return Coordinator(restored(settings, stored), snapshot)


def apart(snapshot: CoordinatorSnapshot) -> CoordinatorSnapshot:
    """Skip a random number of lease ids, so that no id is used twice, even after a backup was restored.

    A database restored from a backup lacks the newest leases, but nodes still hold rollouts of these leases. If a new
    lease had such an id, a node would mistake it for finished work.
    """
    if snapshot.next_lease_id == CoordinatorSnapshot().next_lease_id:
        return snapshot
    return replace(snapshot, next_lease_id=snapshot.next_lease_id + secrets.randbelow(LEASES_APART))


def _say_full(said: str) -> None:
    if said:
        extra = {"event": "disk_full"}
        log.error("the disk is full, and the hub waits until there is room: %s", said, extra=extra)
    else:
        log.warning("there is room on the disk again: the hub goes on", extra={"event": "disk_has_room"})


def _say_away(said: str) -> None:
    if said:
        extra = {"event": "database_away"}
        said = " ".join(said.split())
        log.error("the database server is unavailable; the hub waits until it is back: %s", said, extra=extra)
    else:
        log.warning("the database server is back: the hub continues", extra={"event": "database_back"})


async def _opened_store(config: HubConfig, directory: RunDirectory) -> Store:
    """Open the database. After a power cut, a database server may start later than the hub, so wait for it up to
    `AWAY_AT_START_S`, but not longer, because the URL may be wrong."""
    server = Room(code=DATABASE_AWAY, tell=_say_away)
    in_time = asyncio.get_running_loop().call_later(AWAY_AT_START_S, server.give_up)
    try:
        return await asyncio.to_thread(server.until, lambda: _open_store(config, directory))
    finally:
        server.give_up()
        in_time.cancel()


def _open_store(config: HubConfig, directory: RunDirectory) -> Store:
    """Open the database. Raises StorageError if the run has trained but its database is empty or missing. With a new
    database, the directory would become another run, and nodes would delete their rollouts."""
    url = config.store.url or directory.database_url
    start = read_start(directory)
    trained = directory.trained(started_with=start.policy_version if start else 0)
    if trained and not holds_run(url):
        names = ", ".join(path.relative_to(directory.root).as_posix() for path in trained)
        where = make_url(url).database if url.startswith("sqlite") else make_url(url).render_as_string()
        raise StorageError(
            "This run has trained, but its database is missing or empty.",
            got=f"{names} in {directory.root}; no run in {where}",
            do="Restore the run directory, checkpoints and database together, from one backup, or set store.url to the "
            "run's own database. Without them: its adapters are whole (echo-hub export RUN DIRECTORY), but a new run "
            "must be made (echo-hub init OTHER_DIRECTORY).",
        )
    keeping = Keeping(share=config.keeping.share, max_bytes=config.keeping.max_bytes)
    return Store.open(url, keeping=keeping)


async def check_unchanged(store: AsyncStore, config: HubConfig, content_hash: str) -> None:
    """Raise ConfigError if a setting that must stay the same for a whole run was changed. The first start records these
    settings in the database."""
    fixed = {
        "run.seed": config.run.seed,
        "model.base": config.model.base,
        "model.start_from": config.model.start_from,
        "task.name": config.task.name,
        "task.options": config.task.options,
        "the content of the task's files": content_hash,
        "task.system_prompt": config.task.system_prompt,
        "task.prompt_suffix": config.task.prompt_suffix,
        "task.template_options": config.task.template_options,
        "task.mixture": config.task.model_dump(mode="json")["mixture"],
        "task.draws": config.task.draws,
        "evaluation.problems": config.evaluation.problems,
        "the evaluation sets": [[one.name, one.task, one.problems] for one in config.evaluation_sets],
        "training.groups_per_step": config.training.groups_per_step,
        "training.group_size": config.training.group_size,
        "training.lora_rank": config.training.lora_rank,
        "training.lora_alpha": config.training.lora_alpha,
        "training.lora_targets": config.training.lora_targets,
        "training.rslora": config.training.rslora,
        "sampling.temperature": config.sampling.temperature,
        # Prompts that leave no space for this many tokens are skipped, so this setting decides which problems are
        # drawn.
        "sampling.max_tokens": config.sampling.max_tokens,
        # Whoever checks a bundle of the run can tell cut completions from whole ones only if they all end alike.
        "sampling.stop": list(config.sampling.stop),
    }
    began_with = json.loads((await store.read(read_meta)).get("fixed_settings", "{}"))
    if began_with:
        # A run begun by an older release has not recorded these settings. It uses the values given here.
        began_with = {"model.start_from": "", "training.lora_targets": "all", "training.rslora": False, **began_with}
    if began_with and content_hash:
        # A run begun by an older release has not recorded this setting. It draws problems with replacement.
        began_with.setdefault("task.draws", "replacement")
    changed = [
        f"{name} = {value!r}, was {began_with[name]!r}"
        for name, value in fixed.items()
        if value != began_with.get(name, value)
    ]
    if changed:
        raise ConfigError(
            "A setting that a run keeps from its first day has changed.",
            got="; ".join(changed),
            do="Set it back, or make another run: echo-hub init OTHER_DIRECTORY",
        )
    await store.write(write_meta, "fixed_settings", json.dumps(fixed))


async def _run_id(store: AsyncStore, me: Identity) -> str:
    """Return the run's id. It is made together with the database and bound to the hub's key. Rollout ids are unique
    within a run.

    Raises ConfigError if the database belongs to a hub with another key.
    """
    meta = await store.read(read_meta)
    owner = meta.get("hub_key", me.public_key.hex())
    if owner != me.public_key.hex():
        raise ConfigError(
            "This store belongs to another run: its hub has another key.",
            got=f"a store of the hub {fingerprint(bytes.fromhex(owner))}",
            do="Give each run a store of its own (store.url), and keep hub.key together with it.",
        )
    if "run_id" not in meta:
        meta["run_id"] = f"{me.node_id}-{secrets.token_hex(4)}"
        await store.write(write_meta, "hub_key", owner)
        await store.write(write_meta, "run_id", meta["run_id"])
    return meta["run_id"]


async def _started_at(store: AsyncStore) -> float:
    """Return the time of the run's first start, in seconds since the epoch. The first start stores this time."""
    known = (await store.read(read_meta)).get("started_at")
    if known is None:
        known = repr(time.time())
        await store.write(write_meta, "started_at", known)
    return float(known)


async def _stored_settings(store: AsyncStore, config: HubConfig) -> dict[str, Any]:
    """Return the settings that the operator has changed. If a setting was changed in config.toml after that, it is left
    out, so that the value in config.toml counts."""
    stored, overruled = await store.write(begin_settings, configured(config))
    for name in sorted(overruled):
        log.warning("%s is what config.toml says again: it was changed there since an operator did", name)
    for name in sorted(stored):
        log.info("%s is what an operator has changed it to, whatever config.toml says", name)
    return stored


def _bounds(config: HubConfig, base_dir: Path, codec: PromptCodec) -> SamplingBounds:
    return SamplingBounds(
        vocabulary_size=vocabulary_size(base_dir),
        max_tokens=config.sampling.max_tokens,
        stop_ids=frozenset(codec.stop_ids),
        stop_strings=StopStrings.of_run(config, codec),
        experts=experts_in(base_dir) if config.sampling.replay_routes else None,
    )


def _secret(me: Identity) -> bytes:
    """Return the secret that selects the rollouts to check. The hub's key determines the secret, so every start derives
    the same one."""
    return hashlib.blake2b(me.sign(b"echo: which rollouts are checked"), digest_size=32).digest()


def _unchecked(config: HubConfig, problems: Problems) -> str:
    """Return a warning if an environment wants only checked turns, but the run checks none; else ""."""
    wanting = [key or config.task.name for key, rules in rules_by_task(config, problems).items() if rules.verify_first]
    if not wanting or config.trust.verifier != "off":
        return ""
    names = ", ".join(wanting)
    return f"{names} gets turns that are not checked, although it asks for checks, because trust.verifier is off"


async def _opened_swarm(settings: ServerConfig) -> Swarm:
    """Open the hub's BitTorrent client, which also asks the router for the hub's port. Raises SwarmError."""
    swarm = await open_swarm(
        SwarmSettings(listen_host=settings.host, port=settings.swarm_port, router_ports=settings.router_ports)
    )
    if settings.port:
        swarm.open_port(settings.port)
    return swarm
