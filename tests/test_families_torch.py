"""Every family of base models in PyTorch: learner, sampler and verifier give the same results as plain transformers and
PEFT.

A family's model is tiny and random, in float32. The texts are longer than its windows, chunks and convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo_hub.config.sections import HubConfig, ModelConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.run.start import adapter_files, read_weights
from echo_hub.verify.drawn import DrawnRollout
from echo_hub.verify.worker import Examiner
from echo_node.backends.base import EngineSettings
from echo_node.backends.torch_engine import TorchEngine
from echo_shared.errors import ConfigError
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.sampling.torch_sampler import Batch, sample_groups
from tests.families import FAMILIES, FORMS, VOCABULARY, make_tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:.*fast path.*",
)
MODELS = [*FAMILIES, *FORMS]
STATEFUL = ("qwen3_next", "qwen3_5", "granitemoehybrid", "lfm2")
"""Families with layers, besides attention, that mix tokens. Rows of these families are computed separately."""
TEMPERATURE = 0.8
MAX_TOKENS = 14
STOP_IDS = (1, 2)
LONG = 70
"""Length of a prompt in tokens. It exceeds a chunk of linear attention, which has 64 tokens."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny base model with an adapter, loaded twice: by the learner, and by plain transformers with PEFT."""

    base_dir: Path
    adapter_dir: Path
    settings: LearnerSettings
    policy: Policy
    plain: Any


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Return a function that makes a family's base and adapter, or returns those that it has made before."""

    @cache
    def make(name: str) -> Family:
        base_dir = make_tiny(name, tmp_path_factory.mktemp(name) / "base")
        settings = LearnerSettings(
            base_dir=base_dir,
            seed=3,
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
            stop_ids=STOP_IDS,
            training=TrainingConfig(lora_rank=4, lora_alpha=8),
            learner=LearnerConfig(device="cpu", threads=1, micro_batch_tokens=512),
        )
        policy = Policy.load(settings)
        generator = torch.Generator().manual_seed(1)
        policy.set_adapter(
            {name: 0.1 * torch.randn(one.shape, generator=generator) for name, one in policy.parameters.items()}
        )
        adapter_dir = tmp_path_factory.mktemp(name) / "adapter"
        adapter_dir.mkdir()
        policy.save_adapter(adapter_dir)
        bare = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        plain = PeftModel.from_pretrained(bare, str(adapter_dir), is_trainable=True).eval()
        return Family(base_dir, adapter_dir, settings, policy, plain)

    return make


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest, family_of: Callable[[str], Family]) -> Family:
    return family_of(request.param)


def rollouts_of(lengths: list[int], rng: np.random.Generator) -> tuple[WeightedRollout, ...]:
    return tuple(
        WeightedRollout(
            completion_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            loss_mask=rng.random(length) < 0.8,
            behavior_logprobs=np.zeros(length, np.float32),
            advantages=np.zeros(length),
            weight=1.0,
        )
        for length in lengths
    )


def make_batch() -> tuple[list[WeightedGroup], MicroBatch]:
    rng = np.random.default_rng(5)
    groups = [
        WeightedGroup(
            prompt_ids=rng.integers(0, VOCABULARY, prompt).astype(np.int32), rollouts=rollouts_of(lengths, rng)
        )
        for prompt, lengths in ((3, [20, 9, 12]), (LONG, [11, 2]), (1, [5]))
    ]
    (batch,) = build_micro_batches(groups, micro_batch_tokens=10_000)
    return groups, batch


def plain_figures(model: Any, groups: list[WeightedGroup]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the trained tokens, from a forward pass for each rollout alone."""
    logprobs, entropies = [], []
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            logs = (logits.float() / TEMPERATURE).log_softmax(dim=-1)[torch.from_numpy(rollout.loss_mask)]
            targets = ids[len(group.prompt_ids) :][torch.from_numpy(rollout.loss_mask)]
            logprobs.append(logs.gather(1, targets[:, None])[:, 0])
            entropies.append(-(logs.exp() * logs).sum(dim=1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients_of(parameters: Mapping[str, torch.nn.Parameter], value: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def test_the_learner_computes_what_peft_computes(family: Family, request: pytest.FixtureRequest) -> None:
    groups, batch = make_batch()
    policy = family.policy
    is_stateful = request.node.callspec.params["family"].startswith(STATEFUL)
    assert (batch.rows.longest <= policy._packs_up_to) is not is_stateful
    screened = policy.screened(batch, entropy_gradient=True)
    expected_logprobs, expected_entropies = plain_figures(family.plain, groups)
    torch.testing.assert_close(screened.logprobs_N, expected_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(screened.entropies_N, expected_entropies, atol=1e-5, rtol=1e-5)
    assert 0.2 < expected_entropies.mean() < 0.9 * np.log(VOCABULARY), "a distribution that is neither flat nor sure"

    weights = torch.randn(2, len(expected_logprobs), generator=torch.Generator().manual_seed(2))
    loss = (weights[0] * screened.logprobs_N + weights[1] * screened.entropies_N).sum()
    found = gradients_of(policy.parameters, loss)
    named = {name.replace(".default.", "."): one for name, one in family.plain.named_parameters() if one.requires_grad}
    expected = gradients_of(named, (weights[0] * expected_logprobs + weights[1] * expected_entropies).sum())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, f"{name} has no gradient"
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=1e-5, rtol=0, msg=name)


def test_the_reference_policy_is_the_bare_base(family: Family) -> None:
    groups, batch = make_batch()
    with torch.no_grad(), family.plain.disable_adapter():
        expected, _ = plain_figures(family.plain, groups)
    torch.testing.assert_close(family.policy.reference_logprobs(batch), expected, atol=1e-5, rtol=1e-5)


def make_requests() -> list[GroupRequest]:
    rng = np.random.default_rng(9)
    return [
        GroupRequest(
            lease_id=number,
            group_id=number,
            indices=tuple(range(size)),
            prompt_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            seed=draws.derive_seed("families", number),
            policy_version=1,
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS - number,
            stop_ids=STOP_IDS,
        )
        for number, (length, size) in enumerate([(2, 2), (11, 2), (1, 1), (LONG, 1)])
    ]


@torch.no_grad()
def drawn_one_at_a_time(model: Any, request: GroupRequest, index: int) -> tuple[list[int], list[float]]:
    """Draw a rollout token by token, each from a forward pass over the whole text."""
    ids, logprobs = request.prompt_ids.tolist(), []
    for u in draws.uniforms(request.seed, index, request.max_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1].float().numpy()
        token, nats = draws.draw(logits, np.array([u]), request.temperature)
        ids.append(int(token[0]))
        logprobs.append(float(nats[0]))
        if ids[-1] in request.stop_ids:
            break
    return ids[len(request.prompt_ids) :], logprobs


def drawn_by_engine(family: Family, requests: list[GroupRequest], *, width: int) -> dict[tuple[int, int], Any]:
    engine = TorchEngine()
    engine.open(family.base_dir, family.base_dir, EngineSettings(width=width, threads=1, precision="f32"))
    try:
        engine.set_policy(engine.prepare(family.adapter_dir))
        events = [event for events in engine.sample(iter(requests)) for event in events]
    finally:
        engine.close()
    assert all(isinstance(event, FinishedRollout) for event in events), events
    return {(event.group_id, event.index): event for event in events}


def test_the_sampler_draws_what_one_at_a_time_draws(family: Family) -> None:
    requests = make_requests()
    expected = {
        (request.group_id, index): drawn_one_at_a_time(family.plain, request, index)
        for request in requests
        for index in request.indices
    }
    found = drawn_by_engine(family, requests, width=3)
    prefixes = TorchPrefixCache(4_096)
    batch = Batch(family.policy.model, width=8, prefixes=prefixes, fixed=True)
    by_learner = {(one.group_id, one.index): one for finished in batch.sample(iter(requests)) for one in finished}
    assert found.keys() == by_learner.keys() == expected.keys()
    for key, (ids, logprobs) in expected.items():
        for rollout in (found[key], by_learner[key]):
            assert rollout.completion_ids.tolist() == ids
            np.testing.assert_allclose(rollout.behavior_logprobs, logprobs, atol=1e-4)
    longest = max(expected, key=lambda key: len(expected[key][0]))
    ids, logprobs = expected[longest]
    half = Prefix(
        index=longest[1],
        ids=np.array(ids[: len(ids) // 2], np.int32),
        logprobs=np.array(logprobs[: len(ids) // 2], np.float32),
    )
    begun = replace(requests[longest[0]], indices=(longest[1],), prefixes=(half,))
    resumed = drawn_by_engine(family, [begun], width=1)[longest]
    assert resumed.completion_ids.tolist() == ids
    answered = np.array([*requests[longest[0]].prompt_ids, *ids, 5, 6], np.int32)
    later = replace(requests[longest[0]], prompt_ids=answered, indices=(0,), max_tokens=4, seed=77)
    (next_turn,) = sample_groups(family.policy.model, [later], prefixes=prefixes)
    assert next_turn.completion_ids.tolist() == drawn_one_at_a_time(family.plain, later, 0)[0]


def as_drawn(request: GroupRequest, rollout: FinishedRollout) -> DrawnRollout:
    return DrawnRollout(
        rollout_id=f"{rollout.lease_id}-{rollout.index}",
        prompt_ids=request.prompt_ids,
        **rollout.content(),
        spans=(DrawnSpan(node_id="a", policy_version=1, num_tokens=len(rollout.completion_ids)),),
        seed=request.seed,
        index=rollout.index,
    )


def draws_outside(family: Family, rollouts: list[DrawnRollout]) -> tuple[int, int]:
    """Return how many tokens of these rollouts the verifier examined, and how many lie outside their interval."""
    examiner = Examiner(family.policy, family.settings, kept=2)
    answers = list(examiner.examine(rollouts, {1: family.adapter_dir}))
    assert not [answer for answer in answers if "spans" not in answer], answers
    counts: list[NDArray[np.int64]] = [np.array(span["draws"]) for answer in answers for span in answer["spans"]]
    total = np.sum(counts, axis=0)
    return int(total.sum()), int(total[1:].sum())


def test_the_verifier_finds_every_draw_in_its_interval(family: Family) -> None:
    requests = make_requests()
    drawn = drawn_by_engine(family, requests, width=8)
    honest = [as_drawn(requests[group], rollout) for (group, _), rollout in drawn.items()]
    examined, outside = draws_outside(family, honest)
    assert examined == sum(len(one.completion_ids) for one in honest) > 20
    assert outside == 0
    lying = [replace(one, seed=one.seed + 1) for one in honest]
    assert draws_outside(family, lying)[1] > examined / 2, "other draws are found out"


def test_a_run_starts_from_the_familys_adapter(family: Family) -> None:
    training = family.settings.training
    config = HubConfig(model=ModelConfig(base=str(family.base_dir)), training=training)
    weights = read_weights(family.adapter_dir, config, family.base_dir)
    assert weights.keys() == family.policy.parameters.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, family.policy.parameters[name].detach().numpy())
    path = family.adapter_dir.with_name("other")
    path.mkdir()
    other = {name: weight for name, weight in weights.items() if ".layers.0." not in name}
    for name, content in adapter_files(other, config).items():
        (path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="lacks layers that the run trains"):
        read_weights(path, config, family.base_dir)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "deepseek_v2", "granitemoehybrid", "cohere2"])
def test_bfloat16_differs_by_rounding_alone(name: str, family_of: Callable[[str], Family]) -> None:
    family = family_of(name)
    groups, batch = make_batch()
    learner = family.settings.learner.model_copy(update={"precision": "bfloat16"})
    policy = Policy.load(family.settings.model_copy(update={"learner": learner}))
    policy.set_adapter(policy.read_adapter(family.adapter_dir))
    logprobs = policy.logprobs(batch)
    with torch.no_grad():
        expected, _ = plain_figures(family.plain, groups)
    assert (logprobs - expected).abs().mean() < 0.1
    logprobs.sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in policy.parameters.values())
    requests = make_requests()
    with torch.no_grad(), policy.autocast():
        drawn = [as_drawn(requests[one.group_id], one) for one in sample_groups(policy.model, requests)]
    examined, outside = draws_outside(family, drawn)
    assert outside < examined / 4, "rounding moves few draws by more than .001 nats"
