"""One part in a process of its own: `python -m benchmarks.gpu.part PART SHAPE SEED SECONDS`; its last line is JSON.

Each part prints its progress on standard error and skips work that does not fit into its seconds.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks import demo
from benchmarks.gpu import END_TO_END, Work, device_type, works
from benchmarks.harness.models import matrix_operations_per_s, timed
from benchmarks.harness.processes import RunFailed
from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.requests import GROUP_SIZE, PROMPT_TOKENS, texts
from benchmarks.harness.site import Site, open_site
from benchmarks.learner import compare
from benchmarks.learner.cases import Case, make_batch
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner import determinism, packing
from echo_hub.learner import policy as policy_module
from echo_hub.learner.cuts import Cuts
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import first_cut
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.step import make_optimizer
from echo_hub.learner.within_memory import step_within_memory
from echo_shared.records.step_figures import FITTED_TOKENS, OUT_OF_MEMORY
from echo_shared.sampling import draws, torch_draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups

STEPS: Final = 3
"""The first one is not timed."""
COMPARED_ROLLOUTS: Final = 32
RESERVE_S: Final = 5.0
"""Seconds kept for work after a loop."""
ENDING_S: Final = 12.0
"""Seconds kept for ending the hub and the node."""
LOOK_S: Final = 0.5
RUN: Final = {
    "training": {"steps": 100_000},
    "sampling": {"max_tokens": 6},
    "server": {"port": 0},
}


class Budget:
    """Time budget of a part, which starts with this process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_at = psutil.Process().create_time()

    @property
    def left_s(self) -> float:
        return self._limit_s - (time.time() - self._began_at)

    def say(self, what: str) -> None:
        """Print a progress line."""
        print(f"  {self._limit_s - self.left_s:.0f} of {self._limit_s:.0f} s: {what}", file=sys.stderr, flush=True)


def learner(work: Work, seed: int, budget: Budget) -> dict[str, Any]:
    """Time steps that are cut as the learner would cut them."""
    budget.say("the model is made")
    settings, policy = load(work, seed)
    optimizer = make_optimizer(policy, settings.training)
    case = replace(case_of(work), groups=work.groups)
    groups = make_batch(case, seed)
    budget.say("the learner looks how it must cut a batch")
    cut = first_cut(policy, settings)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        cuts = Cuts(Path(directory) / "checkpoints")
        cuts.put(1, cut)
        for step in range(STEPS):
            if step > 1 and budget.left_s < seconds[-1] + RESERVE_S:
                break
            budget.say(f"step {step + 1} of {STEPS}")
            took_s, outcome = timed(
                lambda step=step: step_within_memory(  # type: ignore[misc]
                    policy, optimizer, groups, settings, cuts=cuts, learner_version=step
                )
            )
            seconds.append(took_s)
    step_s = statistics.median(seconds[1:])
    trained, operations = case.work(seed)
    budget.say("a matrix product is timed")
    peak = matrix_operations_per_s(policy.device, torch.bfloat16 if policy.device.type == "cuda" else torch.float32)
    return {
        "step_s": step_s,
        "first_step_s": seconds[0],
        "steps": len(seconds),
        "tokens_per_s": trained / step_s,
        "matmul_share": operations / step_s / peak,
        "matmul_tflops": peak / 1e12,
        "fitted_tokens": outcome.metrics[FITTED_TOKENS.key],
        "out_of_memory": outcome.metrics[OUT_OF_MEMORY.key],
        "checkpointing": cut.gradient_checkpointing,
        "learns": math.isfinite(outcome.metrics["loss"]) and outcome.metrics["updated"] == 1,
    }


def sampler(work: Work, seed: int, budget: Budget) -> dict[str, Any]:
    """Sample at several widths, swap the adapter, and draw again in float32."""
    budget.say("the model is made")
    _, policy = load(work, seed)
    row: dict[str, Any] = {"left_out": []}
    with policy.autocast():
        budget.say("kernels are chosen, memory is allocated")
        asked = requests(work, seed, GROUP_SIZE)
        took_s, rollouts = timed(lambda: list(sample_groups(policy.model, asked)))
        for width in work.widths:
            # Doubling the width less than doubles the time.
            if budget.left_s < 2 * took_s + RESERVE_S:
                row["left_out"].append(f"width {width}")
                continue
            budget.say(f"width {width}")
            asked = requests(work, seed, width)
            took_s, rollouts = timed(lambda asked=asked: list(sample_groups(policy.model, asked)))  # type: ignore[misc]
            row[f"tokens_per_s_at_{width}"] = sum(len(rollout.completion_ids) for rollout in rollouts) / took_s
    budget.say("the adapter is swapped")
    other = {name: weight.detach().clone() for name, weight in policy.parameters.items()}
    row["swap_ms"] = 1e3 * statistics.median(timed(lambda: policy.set_adapter(other))[0] for _ in range(5))
    row["sampling_peak_gib"] = peak_gib()
    budget.say("float32 draws again")
    return row | agreement(policy, asked, rollouts[:COMPARED_ROLLOUTS], budget)


@torch.inference_mode()
def agreement(
    policy: Policy, asked: list[GroupRequest], rollouts: list[FinishedRollout], budget: Budget
) -> dict[str, Any]:
    """Compute the share of tokens that the same weights in float32 draw as well. Skip rollouts when time runs out."""
    policy.model.float()
    by_group = {request.group_id: request for request in asked}
    same: list[Any] = []
    for rollout in rollouts:
        if same and budget.left_s < RESERVE_S:
            break
        request = by_group[rollout.group_id]
        count = len(rollout.completion_ids)
        ids = np.concatenate([request.prompt_ids, rollout.completion_ids[:-1]]).astype(np.int64)
        fed = torch.from_numpy(ids)[None].to(policy.device)
        logits = policy.model(input_ids=fed, use_cache=False, logits_to_keep=count).logits[0]
        u_R = torch.from_numpy(draws.uniforms(request.seed, rollout.index, count)).to(policy.device)
        tokens_R, _ = torch_draws.draw(logits, u_R, torch.full_like(u_R, request.temperature))
        same.append(tokens_R.numpy(force=True) == rollout.completion_ids)
    return {"agreement": float(np.concatenate(same).mean()), "compared_rollouts": len(same)}


def beside_trl(work: Work, seed: int, budget: Budget) -> dict[str, Any]:
    """Compare a step with that of TRL's trainer (`benchmarks.learner`)."""
    case = case_of(work)
    budget.say("the model is written, both sides load it, then they make a step in turns")
    with tempfile.TemporaryDirectory() as directory:
        return compare(case, Path(directory), seed, Progress([Planned(name=case.name, seconds=case.seconds)]))


def case_of(work: Work) -> Case:
    """Describe a small batch of random tokens."""
    return Case(
        name="beside TRL",
        shape=work.shape,
        prompt_tokens=PROMPT_TOKENS,
        longest=work.completion_tokens,
        precision="bfloat16" if device_type() == "cuda" else "float32",
        steps=3,
        seconds=60,
    )


PARTS: Final[dict[str, Callable[[Work, int, Budget], dict[str, Any]]]] = {
    "learner": learner,
    "sampler": sampler,
    "beside TRL": beside_trl,
}


def load(work: Work, seed: int) -> tuple[LearnerSettings, Policy]:
    """Load a policy whose base is made on the device, because writing and reading 8B weights takes minutes."""
    kind = device_type()

    def random_base(settings: LearnerSettings, device: torch.device, dtype: torch.dtype) -> Any:
        packing.register()
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return AutoModelForCausalLM.from_config(work.shape.config(), attn_implementation=packing.ATTENTION)
        finally:
            torch.set_default_dtype(before)

    policy_module._load_base = random_base
    settings = LearnerSettings(
        base_dir=Path(),
        seed=seed,
        temperature=1.0,
        max_tokens=work.completion_tokens,
        stop_ids=(),
        training=TrainingConfig(learning_rate=1e-6),
        objective=ObjectiveConfig(),
        learner=LearnerConfig(device=kind),
    )
    determinism.choose(deterministic=settings.learner.deterministic)
    policy = Policy.load(settings)
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return settings, policy


def requests(work: Work, seed: int, width: int) -> list[GroupRequest]:
    return texts([work.drawn_tokens] * (width // GROUP_SIZE), seed, vocabulary=work.shape.vocabulary)


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device_type() == "cuda" else None


def end_to_end(seed: int, budget: Budget) -> dict[str, Any]:
    """Train with a hub and a node until the budget is used up. Raises RunFailed if one of them ends early."""
    with tempfile.TemporaryDirectory(prefix="echo-end-to-end-") as scratch:
        budget.say("the hub starts")
        with open_site(Path(scratch) / "site", {**RUN, "run": {"name": "gpu", "seed": seed}}) as site:
            budget.say("the node starts")
            joined_at = time.time()
            node = site.node(["--backend", "torch"], env={"ECHO_NODE_MANNERS__GPU": "always"})
            while budget.left_s > ENDING_S:
                time.sleep(LOOK_S)
                for name, process in (("hub", site.hub), ("node", node.process)):
                    if process.poll() is not None:
                        raise RunFailed(f"the {name} ended with status {process.returncode}: {_last_words(site)}")
            status = [
                sys.executable,
                "-m",
                "echo_node",
                "status",
                "--json",
                "--data-dir",
                str(site.scratch / node.name),
            ]
            said = json.loads(subprocess.run(status, check=True, capture_output=True, text=True).stdout)
        rows = site.rows("SELECT trained_at, num_tokens, metrics FROM steps WHERE trained_at IS NOT NULL ORDER BY step")
        ((quarantines,),) = site.rows("SELECT count(*) FROM trust_log WHERE decision = 'quarantined'")
    if len(rows) < 2:
        raise RunFailed(f"{len(rows)} steps were trained in the time")
    # Rates leave out the first step, which includes the start of the node.
    span_s = rows[-1][0] - rows[0][0]
    return {
        "seconds_to_first_step": rows[0][0] - joined_at,
        "steps": len(rows),
        "tokens_per_s": sum(count for _, count, _ in rows[1:]) / span_s,
        "step_s": span_s / (len(rows) - 1),
        "learner_waited": 1 - demo.utilisation([json.loads(metrics) for _, _, metrics in rows]),
        "quarantines": quarantines,
        "node": f"{said['backend']} on {said['device']}",
        "as_asked": said["device"] == _device(),
        "problems": list(said["problems"].values()),
    }


def _last_words(site: Site) -> str:
    logs = sorted(site.scratch.glob("*.log"))
    return "; ".join(f"{log.stem}: {log.read_text(errors='replace')[-300:]}" for log in logs)


def _device() -> str:
    return torch.cuda.get_device_name() if device_type() == "cuda" else "cpu"


def main(part: str, shape: str, seed: int, limit_s: float) -> None:
    """Print the figures of one part. A part with child processes reports its peak memory itself."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    budget = Budget(limit_s)
    if part == END_TO_END[0]:
        figures = end_to_end(seed, budget)
    else:
        figures = PARTS[part](works()[shape], seed, budget)
        figures = {"peak_gib": peak_gib(), **figures}
    print(json.dumps({"device": _device(), **figures}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
