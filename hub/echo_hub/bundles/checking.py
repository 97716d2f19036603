"""Check a whole bundle in one pass over its blocks: files, records, prompts, draws, rewards, and the step to repeat."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

from echo_hub.bundles.base_files import check_base
from echo_hub.bundles.blocks import BundledGroup
from echo_hub.bundles.discrepancies import Discrepancies, DiscrepancyKind
from echo_hub.bundles.draws import AT_ONCE, DrawCheck, NodeVerdict
from echo_hub.bundles.episodes import BatchOfStep, BundledTurn, turns_of
from echo_hub.bundles.open_settings import checkers_config, why_not_scored
from echo_hub.bundles.reading import Bundle, BundledNode, BundledStep
from echo_hub.bundles.records import RecordCheck
from echo_hub.bundles.repeating import RepeatedStep, repeat_step
from echo_hub.bundles.rewards import RewardCheck, RewardCounts
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.evaluation.work_count import WorkCount
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.base_files import resolve_base, vocabulary_size
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.stop_strings import StopStrings
from echo_hub.verify.verifier import verifier_settings
from echo_hub.verify.worker import Examiner
from echo_shared.errors import EchoError
from echo_shared.signing.identity import fingerprint

KEPT_ADAPTERS: Final = 4
"""Number of policy versions whose adapters are held on the device at a time."""
PROMPTS: Final = 256
"""Number of prompts with which the rounding errors of nodes' engines are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Options of a check: base model, share of rollouts, device, task options."""

    base: str
    share: float = 1.0
    """Share of the rollouts, from 0 to 1, whose draws and rewards are recomputed."""
    seed: int = field(default_factory=lambda: secrets.randbits(32))
    """Seed of the random choice of rollouts to check. It is random, so that no forger can predict the choice."""
    hub_key: str = ""
    """Fingerprint of the key that must have signed the bundle; "" accepts any key."""
    device: str = "auto"
    precision: str = "auto"
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    runs_own_code: bool = False
    repeats_step: bool = True


@dataclass(slots=True, kw_only=True)
class CheckedBundle:
    """Results of the check of one bundle."""

    run_name: str
    run_id: str
    made_at: str
    key: str
    """Fingerprint of the key that signed the bundle."""
    discrepancies: Discrepancies
    seed: int
    share: float
    groups: int = 0
    rollouts: int = 0
    steps: int = 0
    chosen: int = 0
    """Number of rollouts that were chosen for checking and whose tokens are in the bundle."""
    without_tokens: int = 0
    retired: int = 0
    retired_steps: int = 0
    """Number of steps whose records were not compared, because their rollouts are retired."""
    states: dict[str, int] = field(default_factory=dict)
    nodes: list[NodeVerdict] = field(default_factory=list)
    checked_rollouts: int = 0
    checked_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    rewards: RewardCounts | None = None
    """Counts of the compared prompts and rewards; None if they were not recomputed."""
    not_scored: str = ""
    """Why prompts or rewards were not recomputed; "" if all were."""
    step: RepeatedStep | None = None
    draws_s: float = 0.0
    """Seconds spent on recomputing draws, without `measuring_s`."""
    measuring_s: float = 0.0
    """Seconds spent on measuring the rounding errors of nodes' engines."""
    rewards_s: float = 0.0


async def check_bundle(root: Path, wanted: CheckSettings, count: WorkCount) -> CheckedBundle:
    """Check a bundle. Raises CodecError if it cannot be read, and ConfigError if the checker's base model differs from
    the run's.

    `count` receives the number of rollouts that were read.
    """
    bundle, discrepancies = Bundle.open(root), Discrepancies()
    key = fingerprint(bytes.fromhex(bundle.manifest.hub_key))
    if wanted.hub_key and _plain(wanted.hub_key) not in (_plain(key), bundle.manifest.hub_key):
        discrepancies.add(
            DiscrepancyKind.KEY, "manifest.json", f"it is signed by the key {key}, not by {wanted.hub_key}"
        )
    faults = list(bundle.faults())
    for fault in faults:
        discrepancies.add(DiscrepancyKind.FILE, fault.path, fault.fault)
    found = CheckedBundle(
        run_name=bundle.manifest.run_name,
        run_id=bundle.manifest.run_id,
        made_at=bundle.manifest.made_at,
        key=key,
        discrepancies=discrepancies,
        seed=wanted.seed,
        share=wanted.share,
    )
    if faults:
        return found  # The checks below would read the faulty files.
    await _Check(bundle, wanted, found, count).run()
    return found


class _Check:
    def __init__(self, bundle: Bundle, wanted: CheckSettings, found: CheckedBundle, count: WorkCount) -> None:
        self._bundle = bundle
        self._wanted = wanted
        self._found = found
        self._count = count
        self._run = bundle.run()
        self._base_dir = resolve_base(wanted.base)
        check_base(wanted.base, self._base_dir, self._run)
        self._config = checkers_config(
            self._run.settings,
            base=wanted.base,
            options=wanted.options,
            trust={
                "verifier_device": wanted.device,
                "verifier_precision": wanted.precision,
                "verifier_threads": wanted.threads,
            },
        )
        self._codec = PromptCodec.of_run(self._config, self._base_dir)
        self._prompts: list[NDArray[np.int32]] = []

    async def run(self) -> None:
        found, bundle, run = self._found, self._bundle, self._run
        nodes = {one.node: one for one in bundle.nodes()}
        records = RecordCheck(
            run,
            run_seed=self._config.run.seed,
            group_size=self._config.training.group_size,
            discrepancies=found.discrepancies,
        )
        batch = BatchOfStep(run.repeatable.step) if run.repeatable is not None else None
        recorded: BundledStep | None = None
        self._count.total = run.rollouts
        with tempfile.TemporaryDirectory(prefix="echo-bundle-") as temporary:
            async with contextlib.AsyncExitStack() as stack:
                rewards = await self._rewards(stack, Path(temporary))
                draws = self._draws(nodes)
                self._count.begin(time.monotonic())
                for groups in bundle.groups():
                    for group in groups:
                        records.take(group)
                        if batch is not None:
                            batch.take(group)
                    await self._recompute(groups, draws, rewards)
        for step in bundle.steps():
            records.take_step(step)
            if run.repeatable is not None and step.step == run.repeatable.step:
                recorded = step
        records.end()
        found.groups, found.rollouts, found.steps = records.num_groups, records.num_rollouts, records.num_steps
        found.states, found.retired = records.states, run.retired.get("rollouts", 0)
        found.retired_steps = records.retired_steps
        found.nodes = draws.end()
        found.checked_rollouts, found.checked_tokens = draws.rollouts, draws.tokens
        found.refused, found.measured = draws.refused, draws.measured
        found.draws_s, found.measuring_s = draws.seconds, draws.measuring_s
        found.rewards = None if rewards is None else rewards.counts
        if batch is not None and run.repeatable is not None and self._wanted.repeats_step:
            found.step = await repeat_step(
                bundle,
                run.repeatable,
                batch,
                config=self._config,
                settings=self._learner_settings(),
                recorded=recorded,
                discrepancies=found.discrepancies,
                started_with=run.started_with,
            )

    def _learner_settings(self) -> LearnerSettings:
        settings = LearnerSettings.of_run(self._config, base_dir=self._base_dir, stop_ids=self._codec.stop_ids)
        device = settings.learner.device if self._wanted.device == "auto" else self._wanted.device
        if self._wanted.device == "auto" and device != "cpu":
            device = "auto"  # GPU numbers differ between machines, and this machine may have no GPU.
        learner = settings.learner.model_copy(update={"device": device})
        return settings.model_copy(update={"learner": learner})

    def _draws(self, nodes: Mapping[str, BundledNode]) -> DrawCheck:
        disable_progress_bar()  # Transformers would show one while it loads the base.
        settings = verifier_settings(self._config, self._learner_settings())
        examiner = Examiner.open({"settings": settings.model_dump(mode="json"), "kept": KEPT_ADAPTERS})
        return DrawCheck(
            examiner,
            temperature=self._config.sampling.temperature,
            classes={name: NumericsClass(*one.numerics) for name, one in nodes.items()},
            adapters=self._bundle.adapters,
            bounds=SamplingBounds(
                vocabulary_size=vocabulary_size(self._base_dir),
                max_tokens=self._config.sampling.max_tokens,
                stop_ids=frozenset(self._codec.stop_ids),
                stop_strings=StopStrings.of_run(self._config, self._codec),
            ),
            discrepancies=self._found.discrepancies,
        )

    async def _rewards(self, stack: contextlib.AsyncExitStack, logs: Path) -> RewardCheck | None:
        """Prepare the run's task, to recompute prompts and rewards. If that is impossible, note the reason and return
        None."""
        wanted, found, run = self._wanted, self._found, self._run
        found.not_scored = why_not_scored(self._config, options=wanted.options, runs_own_code=wanted.runs_own_code)
        if found.not_scored:
            return None
        try:
            problems = Problems.of_run(self._config, self._codec)
            if problems.content_hash != run.content_hash:
                found.not_scored = "The task's file is not the one of the run."
                return None
            if problems.session_tasks:
                found.not_scored = "The task's environment has state, and a checker cannot play its episodes again."
                return None
            scoring = ScoringPool.open(self._config, problems, base_dir=self._base_dir, logs=logs, is_patient=False)
            pool = await stack.enter_async_context(scoring)
        except EchoError as error:
            found.not_scored = f"The task cannot be made here: {error.brief}"
            return None
        if run.judges:
            found.not_scored = (
                f"Rewards contain what judges said ({', '.join(run.judges)}), which nobody can recompute."
            )
        return RewardCheck(problems, pool, has_judges=bool(run.judges), discrepancies=found.discrepancies)

    async def _recompute(self, groups: list[BundledGroup], draws: DrawCheck, rewards: RewardCheck | None) -> None:
        """Recompute the chosen rollouts of a block, one part after the other, so that the progress display moves."""
        chosen: list[BundledTurn] = []
        read = 0
        for place, group in enumerate(groups):
            if len(self._prompts) < PROMPTS:
                self._prompts.append(group.prompt_ids)
            turns = list(turns_of(group))
            received = sum(one.num_tokens is not None for one in group.rollouts)
            self._found.without_tokens += received - len(turns)
            share, seed = self._wanted.share, self._wanted.seed
            of_group = [turn for turn in turns if is_chosen(turn.rollout.rollout_id, share=share, seed=seed)]
            if of_group and rewards is not None:
                rewards.take_prompt(group)
            chosen += of_group
            read += len(group.rollouts)
            if len(chosen) >= AT_ONCE or place == len(groups) - 1:
                await self._recompute_part(chosen, draws, rewards)
                await asyncio.sleep(0)  # Draws are computed on the event loop: let Ctrl-C take effect.
                self._count.done += read
                chosen, read = [], 0

    async def _recompute_part(
        self, chosen: Sequence[BundledTurn], draws: DrawCheck, rewards: RewardCheck | None
    ) -> None:
        found = self._found
        found.chosen += len(chosen)
        draws.take([(turn.drawn, turn.rollout.is_used) for turn in chosen], self._prompts)
        if rewards is not None:
            began = time.monotonic()
            await rewards.take(chosen)
            found.rewards_s += time.monotonic() - began


def is_chosen(rollout_id: str, *, share: float, seed: int) -> bool:
    """Return True if the random choice includes a rollout. The choice depends only on the seed and the rollout's id."""
    place = int.from_bytes(hashlib.blake2b(f"{seed} {rollout_id}".encode(), digest_size=8).digest(), "little")
    return share >= 1.0 or place < share * 2**64


def _plain(key: str) -> str:
    return "".join(key.split()).lower()
