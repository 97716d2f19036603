from __future__ import annotations

from collections.abc import Iterable

from echo_hub.dashboard.model import (
    EvaluationView,
    FleetView,
    LengthsView,
    NodesAway,
    NodeView,
    WorkView,
)
from echo_shared.records.node import NodeMismatch, TrustStatus
from echo_shared.records.run import Evaluation, EvaluationKind, StepRecord
from echo_shared.records.step_figures import STEP_FIGURES

STARTED = 1_780_000_000.0
STEP_S = 4.0
ROLLOUTS = 512

TRUST = TrustStatus(
    checks={"llama_cpp/q4_k_m/cpu": 90, "torch/bf16/cuda": 410},
    failed_checks={"llama_cpp/q4_k_m/cpu": 1, "torch/bf16/cuda": 0},
    abandoned_checks=3,
    waiting_checks=2,
    quarantined=1,
    checkers=4,
    opinions=520,
    disagreements=3,
    outvoted=2,
    checked_tokens=41_000,
    mismatch=(
        NodeMismatch(node_id=f"{2 * 2654435761 % 16**10:010x}{1:010x}", kl=0.0021, num_tokens=14_900),
        NodeMismatch(node_id=f"{2654435761 % 16**10:010x}{0:010x}", kl=0.0004, num_tokens=31_020),
        NodeMismatch(node_id="f" * 20, kl=0.0002, num_tokens=640),
    ),
)
WORK = WorkView(
    lengths=(
        LengthsView(outcome="trained", rollouts=4_310, mean=5.8, p10=4, p50=6, p90=8, longest=8),
        LengthsView(outcome="in flight", rollouts=190, mean=5.9, p10=4, p50=6, p90=8, longest=8),
        LengthsView(outcome="stale", rollouts=72, mean=7.4, p10=6, p50=8, p90=8, longest=8),
        LengthsView(outcome="no_advantage", rollouts=40, mean=4.1, p10=3, p50=4, p90=5, longest=6),
    ),
    groups_by_staleness={0: 310, 1: 1_204, 2: 534},
    steps=32,
)


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        planned_at=STARTED + STEP_S * (step - 1),
        num_groups=ROLLOUTS // 8,
        trained_at=STARTED + STEP_S * step + (step * 7919 % 10) / 5,
        num_rollouts=ROLLOUTS,
        num_tokens=ROLLOUTS * 6,
        mean_reward=0.45 + 0.45 * (1 - 0.94**step) + (step * 37 % 11 - 5) / 400,
        staleness_mean=min(step - 1, 2) * 0.45 + (step * 31 % 7) / 20,
        staleness_max=min(step - 1, 2),
        figures={
            **{figure.key: None for figure in STEP_FIGURES},
            "seconds": 0.8 + (step * 13 % 5) / 20,
            "loss": -0.01 / step,
            "grad_norm": 0.4 + 1 / step,
            "mismatch_kl": 0.0004 + (step * 17 % 9) * 1e-5,
            "clip_fraction": 0.01,
            "ratio_mean": 1 + (step * 7 % 5 - 2) / 100,
            "ratio_max": 1.5 + (step * 23 % 13) ** 2 / 10,
            "base_kl": 0.02 * (1 - 0.97**step),
            "share_without_advantage": 0.1 + 0.5 * (1 - 0.98**step),
            "share_truncated": 0.02,
            "tokens_per_s": 3_100.0 + step * 41 % 300,
            "eval_s": 1.25 if step % 15 == 1 else 0.0,
            "entropy": 0.3 + 0.9 * 0.97**step,
            "reward_std": 0.49 - step / 200,
            "reward_std_within": 0.37 - step / 200,
            "completion_length": 5.7 + (step * 3 % 5) / 20,
            "completion_length_max": 8.0,
        },
    )


def evaluation_view(version: int) -> EvaluationView:
    accuracy = 0.46 + 0.47 * (1 - 0.93**version)
    return EvaluationView(
        greedy=Evaluation(
            policy_version=version,
            kind=EvaluationKind.GREEDY,
            num_problems=256,
            samples=1,
            num_unscored=0,
            accuracy=accuracy,
            accuracy_error=(accuracy * (1 - accuracy) / 255) ** 0.5,
            pass_at={},
            mean_reward=accuracy,
            mean_tokens=5.75,
            share_truncated=0.01,
            seconds=0.25,
            evaluated_at=STARTED + STEP_S * version,
        ),
        samples=8,
        mean_at_k=accuracy - 0.06,
        mean_at_k_error=0.02,
        pass_at={2: accuracy - 0.01, 4: accuracy + 0.01, 8: min(accuracy + 0.04, 1.0)},
        seconds=1.25,
    )


def fleet_of(nodes: Iterable[NodeView]) -> FleetView:
    here, away = dict[str, NodeView](), dict[str, NodeView]()
    for node in nodes:
        (here if node.connected or node.in_flight else away)[node.totals.node_id] = node
    return FleetView(here=here, away=NodesAway(away))
