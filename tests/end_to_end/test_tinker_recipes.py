"""Unmodified recipes of the Tinker cookbook against a whole hub, alone and with nodes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.live_site import LiveSite, Running
from benchmarks.harness.tenant_site import ALIAS, TenantSite, found
from echo_hub.tenants.requests import SampleResult
from echo_hub.tenants.stored import unpack_outcome
from echo_shared.sampling.draws import derive_seed
from tests.doors import doors_python

REFERENCE = Path(__file__).with_name("plain_torch.py")
SEEDED = Path(__file__).with_name("seeded_recipe.py")
SMALL = {"lora_rank": 8, "max_tokens": 16, "learning_rate": 1e-3}
"""Options of the recipes that sample: a small adapter and short completions, so that a step takes little time."""
GSM8K = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
NO_ROBOTS = "tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"


async def test_sl_loop_trains_as_plain_torch_does(site: LiveSite) -> None:
    doors_python()
    tenants = TenantSite(site)
    await tenants.open()
    key = await tenants.key()
    sizes = {"batch_size": 8, "max_steps": 20, "lora_rank": 8, "learning_rate": 1e-3}
    await found(await tenants.recipe(key, "sl_loop", "sl", **sizes))
    ((lora,),) = tenants.rows("SELECT lora FROM tenant_models")
    seed = (
        derive_seed("lora", json.loads(lora)["seed"]) % 2**63
    )  # Seed of the generator that drew the adapter's first values.
    program = await tenants.program(key, REFERENCE, tenants.base, seed, 8, 8, 20, 1e-3)
    status, text = await program.ended()
    assert status == 0, text[-4_000:]
    losses = [step["train_mean_nll"] for step in tenants.metrics("sl")]
    assert losses == pytest.approx(json.loads(text.splitlines()[-1]), abs=1e-4)
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_recipes_of_four_tenants_share_two_nodes(site: LiveSite) -> None:
    """Four tenants run one recipe each at the same time. sl_basic has also run alone before."""
    doors_python()
    tenants = TenantSite(site)
    # Samples are delivered only after their check, so all checks have passed when the recipes end.
    await tenants.open(drawn_by="nodes", trust={"verifier": "process", "first_checked": 4_096})
    for name in ("node1", "node2"):
        await tenants.node(name)
    await found(await start_sl_basic(tenants, "alone"))
    kl, *others = [await start(tenants) for start in (start_rl_basic, start_rl_loop, start_math_rl)]
    others.append(await start_sl_basic(tenants, "beside"))
    await found(kl)
    check_prompts_and_groups(tenants)  # Check at once, because the hub deletes delivered groups after some minutes.
    for program in others:
        await found(program)
    check_that_others_change_no_bit(tenants)
    check_rewards_and_checks(tenants)
    check_that_training_was_asynchronous(tenants)


async def start_sl_basic(tenants: TenantSite, folder: str) -> Running:
    common = "dataset_builder.common_config"
    options = {
        "dataset_builder": NO_ROBOTS,
        f"{common}.batch_size": 8,
        f"{common}.model_name_for_tokenizer": ALIAS,
        f"{common}.renderer_name": "qwen3",
        f"{common}.max_length": 512,
        "max_steps": 8,
        "lora_rank": 8,
    }
    return await tenants.recipe(await tenants.key("sl"), "sl_basic", folder, before=(SEEDED, 5), **options)


async def start_rl_loop(tenants: TenantSite) -> Running:
    sizes = {"batch_size": 8, "group_size": 8, "max_steps": 12}
    options = {"loss_fn": "importance_sampling", **sizes, **SMALL, "learning_rate": 3e-3}
    return await tenants.recipe(await tenants.key("rl"), "rl_loop", "rl", **options)


async def start_rl_basic(tenants: TenantSite) -> Running:
    options = {
        "dataset_builder": GSM8K,
        "dataset_builder.batch_size": 4,
        "dataset_builder.group_size": 4,
        "dataset_builder.renderer_name": "qwen3",
        "dataset_builder.model_name_for_tokenizer": ALIAS,
        "kl_penalty_coef": 0.1,
        "kl_reference_config.base_model": ALIAS,
        "max_steps": 2,
        **SMALL,
    }
    return await tenants.recipe(await tenants.key("kl"), "rl_basic", "kl", **options)


async def start_math_rl(tenants: TenantSite) -> Running:
    sizes = {"groups_per_batch": 4, "group_size": 4, "max_steps": 6, "eval_every": 0, "max_steps_off_policy": 2}
    options = {"env": "arithmetic", "loss_fn": "ppo", **sizes, **SMALL}
    return await tenants.recipe(await tenants.key("async"), "math_rl.train", "async", **options)


def check_that_others_change_no_bit(tenants: TenantSite) -> None:
    """Check that the recipe sl_basic trained exactly the same adapter next to three other recipes as alone."""
    losses = [[step["train_mean_nll"] for step in tenants.metrics(folder)] for folder in ("alone", "beside")]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    alone, beside = tenants.final_weights("sl")
    assert alone == beside and alone


def check_rewards_and_checks(tenants: TenantSite) -> None:
    """Check that the reward of the recipe rl_loop rose, and that each sample that the hub delivered to a recipe has
    passed its check.

    Three steps have 192 samples, so the means differ by chance by about 0.03; the reward rises by 0.2.
    """
    rewards = [step["reward/total"] for step in tenants.metrics("rl")]
    assert len(rewards) == 12 and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.08
    states = tenants.rows("SELECT state, checked, count(*) FROM rollouts GROUP BY state, checked")
    answered = {checked: count for state, checked, count in states if state == "answered"}
    assert answered.keys() == {"passed"} and answered["passed"] >= 12 * 64 + 2 * 32 + 6 * 16


def check_prompts_and_groups(tenants: TenantSite) -> None:
    """Check that the recipe rl_basic got the base's log-probabilities, and that its samples of equal prompts shared
    groups of leases, so that each prompt was computed once.
    """
    distances = [step["kl_policy_base"] for step in tenants.metrics("kl") if "kl_policy_base" in step]
    assert len(distances) == 2 and np.isfinite(distances).all()
    outcomes = dict(tenants.rows("SELECT request_id, outcome FROM tenant_requests WHERE tenant_id = 'kl'"))
    groups = tenants.rows("SELECT policy_version, prompt_ids, members FROM answers WHERE tenant_id = 'kl'")
    base, num_scored, drawn = AutoModelForCausalLM.from_pretrained(tenants.base), 0, Counter[tuple[int, bytes]]()
    for policy_version, prompt, members in groups:
        for member in json.loads(members):
            result = unpack_outcome(outcomes[member["request_id"]])
            assert isinstance(result, SampleResult)
            if result.prompt_logprobs is None:
                drawn[policy_version, prompt] += member["num_samples"]
                continue
            expected = float32_logprobs(base, np.frombuffer(prompt, "<i4"))
            np.testing.assert_allclose(result.prompt_logprobs.logprobs[1:], expected, atol=1e-4)
            num_scored += 1
    assert num_scored == 2 * 16 == drawn.total() and not any(count % 4 for count in drawn.values())
    # On a busy machine, some equal requests may come too late to share a group.
    assert sum(len(json.loads(members)) > 1 for *_, members in groups) >= 4


@torch.inference_mode()
def float32_logprobs(model: Any, prompt_ids: Any) -> Any:
    """Return the log-probabilities of a prompt's tokens after the first."""
    ids = torch.from_numpy(prompt_ids.astype(np.int64))
    every = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return every[:-1].gather(1, ids[1:, None])[:, 0].numpy()


def check_that_training_was_asynchronous(tenants: TenantSite) -> None:
    """Check that the recipe math_rl sampled and trained at the same time: samples arrived during a training request."""
    rows = tenants.rows("SELECT kind, state, made_at, ended_at FROM tenant_requests WHERE tenant_id = 'async'")
    assert {state for _, state, *_ in rows} == {"done"}
    trained = [(made, ended) for kind, _, made, ended in rows if kind in ("pass", "step")]
    sampled = [(made, ended) for kind, _, made, ended in rows if kind == "sample"]
    assert sum(kind == "step" for kind, *_ in rows) == 6 and len(sampled) >= 6 * 16
    assert any(made < end and begin < ended for made, ended in sampled for begin, end in trained)


@pytest.mark.slow
async def test_rl_loop_trains_with_each_loss_or_fails_with_one_sentence(site: LiveSite) -> None:
    """Three tenants train at the same time. The loss stable_reinforce, the recipe's default, is refused before any
    step, and the error names it.
    """
    doors_python()
    tenants = TenantSite(site)
    await tenants.open()
    sizes = {"batch_size": 4, "group_size": 4, "max_steps": 4, **SMALL}
    wishes: dict[str, dict[str, object]] = {"cispo": {"loss_fn": "cispo"}, "gspo": {"loss_fn": "gspo"}, "own": {}}
    started = {
        name: await tenants.recipe(await tenants.key(name), "rl_loop", name, **wish, **sizes)
        for name, wish in wishes.items()
    }
    status, text = await started.pop("own").ended()
    assert status == 1
    assert "This hub does not offer loss_fn=stable_reinforce" in text.splitlines()[-1]
    assert not any("grad_norm:mean" in step for step in tenants.metrics("own"))
    await asyncio.gather(*map(found, started.values()))
    for name in started:
        steps = tenants.metrics(name)
        assert len(steps) == 4 and any(step.get("grad_norm:mean", 0.0) > 0 for step in steps)
