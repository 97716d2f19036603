"""Processes are killed while unmodified recipes train. Nothing is lost or applied twice, and results are equal to the
bit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness.live_site import LiveSite
from benchmarks.harness.tenant_site import MODELS, VERIFIER, TenantSite, found
from tests.doors import doors_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDED = Path(__file__).with_name("seeded_recipe.py")
SL = {"batch_size": 8, "max_steps": 16, "lora_rank": 8, "learning_rate": 1e-3}
RL = {
    "loss_fn": "importance_sampling",
    "batch_size": 2,
    "group_size": 4,
    "max_tokens": 16,
    "lora_rank": 8,
    "learning_rate": 1e-3,
    "save_every": 1,
}
RL_STEPS = 4
"""Number of steps that the recipe rl_loop makes after it was killed and has resumed."""


async def test_kills_change_no_bit_and_rl_loop_resumes(site: LiveSite) -> None:
    """While sl_loop and rl_loop train, the process of the tenants' models, the hub, a node and the verifier are killed
    in turn, twice. Then rl_loop itself is killed; started again in the same folder, it loads its weights.
    """
    doors_python()
    tenants = TenantSite(site)
    await tenants.open(drawn_by="nodes", tenants={"checkpoint_every": 4}, trust={"verifier": "process"})
    for name in ("node1", "node2"):
        await tenants.node(name)
    sl_key, rl_key = await tenants.key("sl"), await tenants.key("rl")
    await found(await tenants.recipe(sl_key, "sl_loop", "alone", before=(SEEDED, 5), **SL))
    rl = await tenants.recipe(rl_key, "rl_loop", "rl", **RL)
    await tenants.logged("rl", 1, rl)
    sl = await tenants.recipe(sl_key, "sl_loop", "disturbed", before=(SEEDED, 5), **SL)
    blows: list[Callable[[], Awaitable[None]]] = []
    for name in ("node1", "node2"):
        children = [partial(tenants.kill_module, MODELS), partial(tenants.kill_module, VERIFIER)]
        blows += [children[0], tenants.kill_hub, partial(tenants.kill_node, name), children[1]]
    for number, blow in enumerate(blows):
        await tenants.logged("disturbed", 1 + 2 * number - number // 4, sl)
        await blow()
    await found(sl)
    check_adapters(tenants)
    steps = len(tenants.metrics("rl"))
    await tenants.logged("rl", steps + 1, rl)
    await rl.kill()
    await check_resumed(tenants, rl_key)
    check_requests(tenants)


def check_adapters(tenants: TenantSite) -> None:
    losses = [[step["train_mean_nll"] for step in tenants.metrics(name)] for name in ("alone", "disturbed")]
    assert losses[0] == losses[1] and len(losses[0]) == SL["max_steps"]
    alone, disturbed = tenants.final_weights("sl")
    assert alone == disturbed and alone


async def check_resumed(tenants: TenantSite, key: str) -> None:
    before = tenants.metrics("rl")
    last = before[-1]["progress/batch"] + RL_STEPS
    await found(await tenants.recipe(key, "rl_loop", "rl", **RL, max_steps=last + 1))
    batches = [step["progress/batch"] for step in tenants.metrics("rl")[len(before) :]]
    assert batches == list(range(batches[0], last + 1)) and 0 < batches[0] <= before[-1]["progress/batch"] + 1
    loads = "SELECT state, count(*) FROM tenant_requests WHERE tenant_id = 'rl' AND kind = 'load' GROUP BY state"
    assert tenants.rows(loads) == [("done", 1)]
    steps = [
        steps for (steps,) in tenants.rows("SELECT steps FROM tenant_models WHERE tenant_id = 'rl' ORDER BY made_at")
    ]
    trained = sum("grad_norm:mean" in step for step in tenants.metrics("rl")[len(before) :])
    assert len(steps) == 2 and steps[1] >= trained


def check_requests(tenants: TenantSite) -> None:
    """Check that each request succeeded, and that each model made one step for each optim_step. Requests of the killed
    rl_loop may be unfinished.
    """
    states = {state for (state,) in tenants.rows("SELECT DISTINCT state FROM tenant_requests")}
    assert states <= {"done", "waiting"}
    waiting = tenants.rows("SELECT DISTINCT tenant_id FROM tenant_requests WHERE state = 'waiting'")
    assert waiting in ([], [("rl",)])
    asked = "SELECT owner_id, count(*) FROM tenant_requests WHERE kind = 'step' AND state = 'done' GROUP BY owner_id"
    of_loaded = "SELECT owner_id FROM tenant_requests WHERE kind = 'load'"
    made = f"SELECT model_id, steps FROM tenant_models WHERE steps > 0 AND model_id NOT IN ({of_loaded})"
    steps = dict(tenants.rows(asked))
    assert {model_id: steps[model_id] for model_id, _ in tenants.rows(made)} == dict(tenants.rows(made))
