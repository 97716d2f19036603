"""The verifier must find no fault in honest rollouts of the run's own problems that are read from the store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from transformers import AutoModelForCausalLM

from echo_hub.cluster.model_processes import ProcessBeside
from echo_hub.config.sections import HubConfig, TrustConfig
from echo_hub.core.accounting.effects import GroupOpened, RolloutReceived, RolloutsDropped, RolloutsLeased
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.trust.evidence import Evidence
from echo_hub.intake.episodes import DrawnRollouts
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.asked import AskedGroups
from echo_hub.scoring.problems import Problems
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.store import Store
from echo_hub.verify.drawn import NodeEvidence
from echo_hub.verify.verifier import Verifier, program, verifier_settings
from echo_shared.records.rollout import RolloutPayload
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups
from echo_shared.wire.messages import DropReason, rollout_id


def drawn(
    problems: Problems, codec: PromptCodec, *, lease_id: int, group_id: int, attempt: int
) -> list[FinishedRollout]:
    request = GroupRequest(
        lease_id=lease_id,
        group_id=group_id,
        indices=(0, 1, 2),
        prompt_ids=problems.prompt_ids(group_id),
        seed=turn_seed(problems.seed(group_id), 0, attempt),
        policy_version=0,
        temperature=1.0,
        max_tokens=16,
        stop_ids=codec.stop_ids,
    )
    return list(sample_groups(AutoModelForCausalLM.from_pretrained(resolve_base("builtin:tiny")), [request]))


class Told:
    def __init__(self, expected: int) -> None:
        self.of: dict[str, tuple[NodeEvidence, ...]] = {}
        self.all = asyncio.Event()
        self._expected = expected

    async def checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        self.of[rollout_id] = spans
        if len(self.of) == self._expected:
            self.all.set()

    async def abandoned(self, rollout_id: str, why: str) -> None:
        raise AssertionError(f"{rollout_id}: {why}")

    async def measured(self, rounding: str, policy_version: int, evidence: Evidence | None, seconds: float) -> None:
        raise AssertionError(f"Nobody has asked for {rounding}.")


async def test_what_is_stored_of_honest_rollouts_is_found_honest(tmp_path: Path) -> None:
    """Group 0 is sampled with its first seed, and group 1 again with another seed after a failure of the scorer."""
    config = HubConfig(trust=TrustConfig(verifier_device="cpu"))
    base = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base)
    problems = Problems.of_run(config, codec)
    store = AsyncStore(Store.open(f"sqlite:///{tmp_path / 'echo.db'}"))
    expected = {}
    for lease_id, group_id, attempt in ((1, 0, 0), (2, 1, 0), (3, 1, 1)):
        lease = RolloutsLeased(
            lease_id=lease_id, node_id="a", group_id=group_id, indices=(0, 1, 2), policy_version=0, deadline=9.0
        )
        opened = [GroupOpened(group_id=group_id, seed=problems.seed(group_id))] if not attempt else []
        await store.apply([*opened, lease], now=1.0)
        for one in drawn(problems, codec, lease_id=lease_id, group_id=group_id, attempt=attempt):
            payload = RolloutPayload(
                completion_ids=one.completion_ids,
                behavior_logprobs=one.behavior_logprobs,
                finish_reason=one.finish_reason,
                sampling_s=0.1,
            )
            name = rollout_id(lease_id, one.index)
            await store.apply([RolloutReceived(rollout_id=name, received_at=2.0, payload=payload)], now=2.0)
            expected[name] = len(one.completion_ids)
        if lease_id == 2:
            failed = [name for name in expected if name.startswith("2-")]
            await store.apply([RolloutsDropped(rollout_ids=tuple(failed), reason=DropReason.SCORER_FAILED)], now=3.0)
            expected = {name: count for name, count in expected.items() if name not in failed}
    told = Told(len(expected))
    settings = LearnerSettings.of_run(config, base_dir=base, stop_ids=codec.stop_ids)
    chosen = verifier_settings(config, settings)
    process = ProcessBeside(program(chosen), chosen, logs=tmp_path)
    verifier = Verifier(
        process,
        chosen,
        directory=RunDirectory(tmp_path),
        kept=1,
        patience=1,
        rollouts=DrawnRollouts(store, problems, AskedGroups(), run_seed=config.run.seed, codec=codec),
    )
    for name in expected:
        verifier.submit(name, is_urgent=True)
    task = asyncio.create_task(verifier.run(told))
    try:
        async with asyncio.timeout(120):
            await told.all.wait()
    finally:
        task.cancel()
        await asyncio.wait({task})
        await store.close()
    for name, count in expected.items():
        ((node_id, shown),) = told.of[name]
        assert (node_id, shown.draws[0], shown.num_tokens) == ("a", count, count), name
        assert 0 < shown.claims[0] == shown.num_claims <= count, name
