"""The model process and the hub are killed at any call. Models and outcomes must be the same as without kills."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from echo_hub.config.tenants_section import TenantsConfig
from echo_hub.tenants.hub_drawer import HubDrawer
from echo_hub.tenants.outcomes import Failed, Outcome, Pending, WeightsSaved
from echo_hub.tenants.requests import (
    AdamStep,
    ForwardBackward,
    LoraWish,
    PassResult,
    SampleResult,
    SamplingWish,
    WeightsKind,
)
from echo_hub.tenants.service import TenantService
from tests.echo_hub.tenants.conftest import TenantHub, ended
from tests.echo_hub.tenants.small_models import BAD_TOKEN, DEADLY_TOKEN
from tests.echo_hub.tenants.test_service import PROMPT, new_model, passing

Request = ForwardBackward | AdamStep | str
SCRIPT: Sequence[Request] = (
    passing(1),
    passing(2),
    AdamStep(learning_rate=0.5),
    passing(3),
    "save",
    passing(BAD_TOKEN),
    AdamStep(),
    passing(4, forward_only=True),
    passing(5),
    AdamStep(learning_rate=0.25),
    "version",
    passing(6),
    passing(7),
    AdamStep(learning_rate=0.125),
    passing(8),
)
ON_POSTGRESQL = (3, 7)
"""Seeds of the random sequences that run on PostgreSQL."""
KILLS = (*["forward_backward", "optim_step", "load"] * 3, "create", "drop_gradient", "save", "export")
"""Calls at which the process dies. Frequent calls are listed several times, so that they are chosen more often."""


async def ask(service: TenantService, model_id: str, seq_id: int, request: Request) -> str:
    if isinstance(request, AdamStep):
        return (await service.optim_step("ada", model_id, seq_id=seq_id, step=request)).request_id
    if isinstance(request, ForwardBackward):
        return (await service.forward_backward("ada", model_id, seq_id=seq_id, request=request)).request_id
    kind, name = (WeightsKind.TRAINING, "mid") if request == "save" else (WeightsKind.SAMPLER, None)
    number = None if name else 0
    saved = await service.save_weights("ada", model_id, seq_id=seq_id, kind=kind, name=name, sampler_seq_id=number)
    return saved.request_id


async def begin(service: TenantService) -> str:
    session_id = await service.create_session("ada", about={})
    await service.create_model(
        "ada", session_id, model_seq_id=0, base_model="base", lora=LoraWish(seed=5), user_metadata={}
    )
    return f"{session_id}:train:0"


def state(hub: TenantHub, model_id: str) -> list[list[float]]:
    model = hub.starter.current.models[model_id]
    return [model.weights.tolist(), model.moment.tolist(), model.gradient.tolist(), [float(model.steps)]]


def seen(outcome: Outcome) -> object:
    """Return what a client sees of an outcome, without ids."""
    if isinstance(outcome, PassResult):
        return [each.tolist() for each in outcome.logprobs], dict(outcome.metrics)
    if isinstance(outcome, WeightsSaved):
        return bool(outcome.path), bool(outcome.sampler_id)
    return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], list[list[float]]]:
    """Return the outcomes of the script, and the model's final state, from a run without kills."""

    async def run() -> tuple[list[object], list[list[float]]]:
        hub = TenantHub(tmp_path_factory.mktemp("undisturbed"))
        async with hub.serving() as service:
            model_id = await begin(service)
            ids = [await ask(service, model_id, seq_id, request) for seq_id, request in enumerate(SCRIPT, 1)]
            outcomes = [seen(await ended(service, request_id)) for request_id in ids]
            return outcomes, state(hub, model_id)

    return asyncio.run(run())


def test_the_script_has_failures(undisturbed: tuple[list[object], list[list[float]]]) -> None:
    outcomes, _ = undisturbed
    assert [isinstance(each, Failed) for each in outcomes] == [number in (5, 6) for number in range(len(SCRIPT))]


@pytest.mark.parametrize("seed", range(8))
async def test_kills_of_the_process_change_nothing(
    tmp_path: Path, seed: int, undisturbed: tuple[list[object], list[list[float]]]
) -> None:
    rng = np.random.default_rng(seed)
    hub = TenantHub(tmp_path, config=TenantsConfig(checkpoint_every=int(rng.integers(1, 4))))
    async with hub.serving() as service:
        model_id, outcomes = await begin(service), []
        for seq_id, request in enumerate(SCRIPT, 1):
            if seq_id > 1 and rng.random() < 0.7:
                arm(hub, rng)
            accepted = await ask(service, model_id, seq_id, request)
            outcomes.append(seen(await ended(service, accepted)))
        hub.starter.current.dies_before = hub.starter.current.dies_after = ""
        accepted = await ask(service, model_id, len(SCRIPT) + 1, passing(9, forward_only=True))
        await ended(service, accepted)
        assert (outcomes, state(hub, model_id)) == undisturbed
    assert len(hub.starter.lives) > 1


def arm(hub: TenantHub, rng: np.random.Generator) -> None:
    """Make the process die before or after one of its next calls."""
    name = str(rng.choice(KILLS))
    if rng.random() < 0.5:
        hub.starter.current.dies_before = name
    else:
        hub.starter.current.dies_after = name


@pytest.mark.parametrize("seed", range(8))
async def test_kills_of_the_hub_change_nothing(
    tmp_path: Path,
    seed: int,
    undisturbed: tuple[list[object], list[list[float]]],
    request: pytest.FixtureRequest,
) -> None:
    """Send requests without waiting, kill the hub after a few, and send the last two requests again, as clients do that
    got no answer."""
    rng = np.random.default_rng(seed)
    hub = TenantHub(tmp_path, config=TenantsConfig(checkpoint_every=int(rng.integers(1, 4))))
    if seed in ON_POSTGRESQL:
        hub.database_url = request.getfixturevalue("postgresql_without_rows")
    model_id, ids, sent = "", [""] * len(SCRIPT), 0
    for count in parts(rng, len(SCRIPT)):
        async with hub.serving(killed=True) as service:
            model_id = model_id or await begin(service)
            for number in (*range(max(0, sent - 2), sent), *range(sent, sent + count)):
                request_id = await ask(service, model_id, number + 1, SCRIPT[number])
                assert ids[number] in ("", request_id), "an id that was answered once stays the same"
                ids[number] = request_id
            sent += count
            for _ in range(int(rng.integers(0, 40))):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                await asyncio.sleep(0.02)
    async with hub.serving() as service:
        outcomes = [seen(await ended(service, request_id)) for request_id in ids]
        accepted = await ask(service, model_id, len(SCRIPT) + 1, passing(9, forward_only=True))
        await ended(service, accepted)
        assert (outcomes, state(hub, model_id)) == undisturbed
        assert (await service.model("ada", model_id)).steps == 3


def parts(rng: np.random.Generator, total: int) -> Iterator[int]:
    while total:
        count = min(total, int(rng.integers(1, 6)))
        total -= count
        yield count


async def test_samples_are_drawn_the_same_after_a_kill(hub_of_each: TenantHub) -> None:
    wishes = [SamplingWish(num_samples=2, max_tokens=6), SamplingWish(max_tokens=6, seed=3), SamplingWish(max_tokens=6)]
    async with hub_of_each.serving(killed=True) as service:
        session_id = await service.create_session("ada", about={})
        sampler_id = await service.create_sampler("ada", session_id, sampler_seq_id=0, base_model="base")
        accepted = [
            await service.sample("ada", sampler_id, seq_id=seq_id, prompt_ids=PROMPT, wish=wish)
            for seq_id, wish in enumerate(wishes)
        ]
        before = [await ended(service, each.request_id) for each in accepted]
        hub_of_each.starter.current.draws_go_on.clear()
        again = [
            await service.sample("ada", sampler_id, seq_id=10 + seq_id, prompt_ids=PROMPT + 1, wish=wish)
            for seq_id, wish in enumerate(wishes)
        ]
        await asyncio.sleep(0.05)
    async with hub_of_each.serving() as service:
        assert [seen_sample(await ended(service, each.request_id)) for each in accepted] == list(
            map(seen_sample, before)
        )
        drawn = [seen_sample(await ended(service, each.request_id)) for each in again]
        given = await service.sample("ada", sampler_id, seq_id=20, prompt_ids=PROMPT + 1, wish=wishes[1])
        assert seen_sample(await ended(service, given.request_id)) == drawn[1] == seen_sample(before[1])
        assert len({tuple(ids) for samples in drawn for ids in samples}) == 4


def seen_sample(outcome: Outcome) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in outcome.samples]  # type: ignore[union-attr]


async def test_a_deadly_request_fails_and_stops_nobody(tenant_hub: TenantHub) -> None:
    async with tenant_hub.serving() as service:
        first, second = await begin(service), await begin(service)
        ids = [
            await ask(service, first, seq_id, one) for seq_id, one in enumerate([passing(1), passing(DEADLY_TOKEN)], 1)
        ]
        other = await ask(service, second, 1, passing(2))
        outcome = await ended(service, ids[1])
        assert isinstance(outcome, Failed) and outcome.category == "server" and "died 3 times" in outcome.error
        assert isinstance(await ended(service, other), PassResult)
        step = await ask(service, first, 3, AdamStep())
        assert isinstance(await ended(service, step), Failed)
        after = [await ask(service, first, 4, passing(1)), await ask(service, first, 5, AdamStep())]
        assert not any([isinstance(await ended(service, each), Failed) for each in after])


async def test_a_stop_while_a_version_is_published_or_draws_loses_nothing(
    tenant_hub: TenantHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = asyncio.Event()

    async def publish(drawer: HubDrawer, policy_version: int, directory: Path) -> None:
        await published.wait()

    async def save(seq_id: int) -> str:
        accepted = await service.save_weights(
            "ada", model_id, seq_id=seq_id, kind=WeightsKind.SAMPLER, name=None, sampler_seq_id=seq_id, inflight=True
        )
        return accepted.request_id

    monkeypatch.setattr(HubDrawer, "publish", publish)
    async with tenant_hub.serving() as service:
        model_id = await new_model(service)
        saved = await save(1)
        assert isinstance(await service.outcome("ada", saved, wait_s=0.1), Pending)
    published.set()
    async with tenant_hub.serving() as service:
        outcome = await ended(service, saved)
        assert isinstance(outcome, WeightsSaved)
        await ended(service, await save(2))
        tenant_hub.starter.current.draws_go_on.clear()
        wish = SamplingWish(max_tokens=2)
        sample = await service.sample("ada", outcome.sampler_id, seq_id=0, prompt_ids=PROMPT, wish=wish)
        await ended(service, await save(3))  # From here on, only the sample uses its version.
        assert isinstance(await service.outcome("ada", sample.request_id, wait_s=0.1), Pending)
    async with tenant_hub.serving() as service:
        assert isinstance(await ended(service, sample.request_id), SampleResult)
