"""Run one part in its own process: `python -m benchmarks.gpu.part PART SHAPE SEED [SECONDS]`. The last line of output
is JSON.

`python -m benchmarks.gpu.part --serve` runs the parts that it is asked for on standard input (see `running`). Each part
prints its progress on standard error, and skips work that does not fit into its seconds.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu
from benchmarks.gpu import end_to_end, probe, running
from benchmarks.gpu.running import Budget
from benchmarks.gpu.shapes import SHAPES, Shape, device_type
from benchmarks.harness.engine import GROUP_SIZE, PROMPT_TOKENS, texts
from benchmarks.harness.models import matrix_operations_per_s, timed
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner import determinism, packing
from echo_hub.learner import policy as policy_module
from echo_hub.learner.cuts import Cuts
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import first_cut
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer
from echo_hub.learner.within_memory import step_within_memory
from echo_shared.records.step_figures import FITTED_TOKENS, OUT_OF_MEMORY
from echo_shared.sampling import draws, torch_draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import Batch
from echo_shared.wire.messages import FinishReason

STEPS: Final = 3
"""Training steps of the part `learner`; the first one is not timed."""
COMPARED_ROLLOUTS: Final = 32
IMPORTS_S: Final = 15.0
"""Assumed seconds for importing libraries, for a part that is started by hand without a limit."""
RESERVE_S: Final = 5.0
"""Seconds of a part's time budget that its measuring loop leaves for the work after the loop."""


def learner(shape: Shape, seed: int, budget: Budget) -> dict[str, Any]:
    """Time training steps on prepared rollouts. The learner itself divides them into passes that fit in memory."""
    budget.say("the model is made")
    settings, policy = load(shape, seed)
    optimizer = make_optimizer(policy, settings.training)
    groups = batch(shape, seed)
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
    trained = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
    budget.say("a matrix product is timed")
    operations = shape.operations(trained + len(groups) * PROMPT_TOKENS, trained)
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


def sampler(shape: Shape, seed: int, budget: Budget) -> dict[str, Any]:
    """Sample twice at each of several widths (rollouts at the same time). Time only the second pass, in which steps run
    as captured CUDA graphs. Then time swaps of the adapter, and draw the same tokens in float32 for comparison.
    """
    budget.say("the model is made")
    _, policy = load(shape, seed)
    row: dict[str, Any] = {"left_out": []}
    took_s = 0.0
    with policy.autocast():
        for width in shape.widths:
            # Doubling the width less than doubles the time.
            if budget.left_s < 2 * took_s + RESERVE_S:
                row["left_out"].append(f"width {width}")
                continue
            budget.say(f"width {width}: kernels are chosen, steps are captured, memory is allocated")
            asked = texts([shape.drawn_tokens] * (width // GROUP_SIZE), seed, vocabulary=shape.vocabulary)
            batch = Batch(policy.model, width=width)
            took_s, rollouts = timed(lambda batch=batch, asked=asked: drawn(batch, asked))  # type: ignore[misc]
            budget.say(f"width {width}")
            again_s, rollouts = timed(lambda batch=batch, asked=asked: drawn(batch, asked))  # type: ignore[misc]
            took_s += again_s
            row[f"sampler_tokens_per_s_at_{width}"] = tokens_of(rollouts) / again_s
            del batch
        if not row["left_out"]:
            budget.say(f"width {width}: a plain step as a CUDA graph")
            row["share_of_graph_probe"] = tokens_of(rollouts) / again_s / probe.tokens_per_s(policy, width)
    budget.say("the adapter is swapped")
    other = {name: weight.detach().clone() for name, weight in policy.parameters.items()}
    row["swap_ms"] = 1e3 * statistics.median(timed(lambda: policy.set_adapter(other))[0] for _ in range(5))
    row["sampling_peak_gib"] = peak_gib()
    budget.say("float32 draws again")
    return row | agreement(policy, asked, rollouts[:COMPARED_ROLLOUTS], budget)


def drawn(batch: Batch, asked: list[GroupRequest]) -> list[FinishedRollout]:
    return [rollout for finished in batch.sample(iter(asked)) for rollout in finished]


def tokens_of(rollouts: list[FinishedRollout]) -> int:
    return sum(len(rollout.completion_ids) for rollout in rollouts)


@torch.inference_mode()
def agreement(
    policy: Policy, asked: list[GroupRequest], rollouts: list[FinishedRollout], budget: Budget
) -> dict[str, Any]:
    """Return the share of sampled tokens that the same weights in float32 give for the same uniforms. If time runs out,
    the last rollouts are not compared.
    """
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
        tokens_R, _ = torch_draws.draw_float64(logits, u_R, torch.full_like(u_R, request.temperature))
        same.append(tokens_R.numpy(force=True) == rollout.completion_ids)
    return {"agreement": float(np.concatenate(same).mean()), "compared_rollouts": len(same)}


def beside_trl(shape: Shape, seed: int, budget: Budget) -> dict[str, Any]:
    """Compare a training step of Echo with one of TRL's trainer (`benchmarks.learner`)."""
    from benchmarks.harness.progress import Planned, Progress
    from benchmarks.learner import Case, compare, shape_of

    case = Case(
        name="beside TRL",
        shape=shape_of(max(64, shape.hidden), shape.layers, shape.intermediate, shape.vocabulary),
        prompt_tokens=PROMPT_TOKENS,
        longest=shape.completion_tokens,
        groups=2,
        precision="float32" if shape.tiny else "bfloat16",
        steps=3,
        seconds=60,
    )
    budget.say("the model is written, both sides load it, then they make a step in turns")
    with tempfile.TemporaryDirectory() as directory:
        row = compare(case, Path(directory), seed, Progress([Planned(name=case.name, seconds=case.seconds)]))
    return {**row, "time_over_trl": row["time_ratio"]}


PARTS: Final[dict[str, Callable[[Shape, int, Budget], dict[str, Any]]]] = {
    "learner": learner,
    "sampler": sampler,
    "beside TRL": beside_trl,
}


def load(shape: Shape, seed: int) -> tuple[LearnerSettings, Policy]:
    """Load a policy. Its random base is made on the device, because writing and reading 8B weights takes minutes."""
    kind = device_type()

    def random_base(settings: LearnerSettings, device: torch.device, dtype: torch.dtype) -> Any:
        packing.register()
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return AutoModelForCausalLM.from_config(shape.config(), attn_implementation=packing.ATTENTION)
        finally:
            torch.set_default_dtype(before)

    policy_module._load_base = random_base
    settings = LearnerSettings(
        base_dir=Path(),
        seed=seed,
        temperature=1.0,
        max_tokens=shape.completion_tokens,
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


def batch(shape: Shape, seed: int) -> list[TrainingGroup]:
    """Make groups with random tokens. The shortest completion has an eighth of the longest one's tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(shape.completion_tokens / 8, shape.completion_tokens, shape.groups * GROUP_SIZE)
    shuffled = rng.permutation(lengths.round().astype(int)).reshape(shape.groups, GROUP_SIZE)
    return [
        TrainingGroup(
            prompt_ids=rng.integers(0, shape.vocabulary, PROMPT_TOKENS).astype(np.int32),
            rollouts=tuple(
                TrainingRollout(
                    completion_ids=rng.integers(0, shape.vocabulary, length).astype(np.int32),
                    loss_mask=np.ones(length, dtype=bool),
                    behavior_logprobs=np.full(length, -math.log(shape.vocabulary), dtype=np.float32),
                    reward=float(rng.random()),
                    finish_reason=FinishReason.STOP,
                    sampling_s=0.0,
                )
                for length in of_group.tolist()
            ),
        )
        for of_group in shuffled
    ]


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device_type() == "cuda" else None


def run(part: str, shape: str, seed: int, limit_s: float) -> dict[str, Any]:
    """Run one part. Return its figures, its peak memory and the name of the device. Parts with child processes report
    peak memory themselves.
    """
    budget = Budget(f"{part}, {shape}", limit_s)
    kind = device_type()
    device = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    if part == end_to_end.PART:
        return {"device": device, **end_to_end.measure(seed, budget, device=kind)}
    figures = PARTS[part](SHAPES[shape], seed, budget)
    return {"device": device, "peak_gib": peak_gib(), **figures}


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if sys.argv[1:] == [running.SERVE]:
        running.serve(run)
        return
    part, shape, seed, *limit = sys.argv[1:]
    print(json.dumps(run(part, shape, int(seed), float(limit[0]) if limit else gpu.PARTS[part] - IMPORTS_S)))


if __name__ == "__main__":
    main()
