"""Mixtures of experts: mismatch between sampler and learner, with and without replayed routes, and gain of training. A
route is the set of experts that a router chose for a token; the learner replays a route by using the engine's experts.

Small models with the architectures of Qwen3-MoE and gpt-oss, and a dense model, learn to continue this repository's own
source. Then an engine of low precision samples and records routes. A float32 learner computes the same tokens: once
with its own routes, and once with the engine's. `mismatch_kl` is the learner's metric: the mean of exp d - 1 - d, where
d is the learner's log-probability minus the engine's. For q8_0, only weights are rounded, as llama.cpp packs them.

The learning cases compare a dense model with a mixture of experts that uses as many parameters for each token. `SEEDS`
small bases of each form learn the text until they reach the same held-out loss, `LEVEL`. Then GRPO trains LoRA on
attention, from rollouts of a bfloat16 engine, with equal settings. The reward is the share of a completion's characters
that are vowels. `gain` is the mean over the seeds, `gain_error` its standard error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

import echo_shared
from benchmarks.harness.engine import group_request
from benchmarks.harness.progress import Measurement, Planned, Progress
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.verify.emulation import Symmetric, in_blocks
from echo_shared.records.rollout import RolloutPayload
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_routes import Replay
from echo_shared.sampling.torch_sampler import sample_groups
from echo_shared.wire.messages import NO_ROUTE

DESCRIPTION: Final = "Mixtures of experts: mismatch with and without replayed routes, and learning beside a dense model"

VOCABULARY: Final = 256
"""Size of the models' vocabulary: one token for each value of a byte."""
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Architecture of a model. All models have 6 layers, and about the same number of used parameters per token."""

    name: str
    config: str
    options: dict[str, Any]
    small: dict[str, Any]
    """Options that replace those of `options` with the same name, in the learning cases."""


DENSE: Final = Form(
    name="dense",
    config="Qwen3",
    options={"intermediate_size": 512, "tie_word_embeddings": True},
    small={"intermediate_size": 256},
)
QWEN: Final = Form(
    name="Qwen3-MoE",
    config="Qwen3Moe",
    options={
        "intermediate_size": 512,
        "moe_intermediate_size": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": True,
    },
    small={"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4},
)
GPT_OSS: Final = Form(
    name="gpt-oss",
    config="GptOss",
    options={
        "intermediate_size": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.01,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    small={},
)
FORMS: Final = (DENSE, QWEN, GPT_OSS)
LAYERS: Final = 6
WIDTH: Final = 256

READ_STEPS: Final = 60
"""Training steps in which a model learns the text."""
READ_ROWS: Final = 8
READ_TOKENS: Final = 128
READ_RATE: Final = 2e-3
READ_WARMUP: Final = 20

PRECISIONS: Final = ("bf16", "q8_0")
PROMPTS: Final = 16
PROMPT_TOKENS: Final = 32
SIZE: Final = 2
"""Number of completions of each prompt, in the cases that measure the mismatch."""
NEW_TOKENS: Final = 64

SEEDS: Final = 5
LEARNING_LAYERS: Final = 2
LEARNING_WIDTH: Final = 64
LEVEL: Final = 2.6
"""Held-out loss, in nats per byte, up to which each base model learns the text before a learning case begins."""
LEVEL_EVERY: Final = 5
"""Training steps between two measurements of the held-out loss."""
LEVEL_STEPS: Final = 1_000
HELD_OUT: Final = 32
STEPS: Final = 30
LEARNED_GROUPS: Final = 8
LEARNED_SIZE: Final = 8
LEARNED_TOKENS: Final = 16
ENDS: Final = 5
"""Number of training steps at the start, and at the end, whose mean rewards are compared to get the gain."""
_VOWELS: Final = np.frombuffer(b"aeiou", np.uint8)


def mismatch_case(form: Form, precision: str) -> str:
    return f"mismatch, {form.name}, {precision}"


def learning_case(form: Form, *, replays: bool) -> str:
    return f"learning, {form.name}" + ("" if form is DENSE else ", replayed" if replays else ", own routes")


def plan() -> list[Planned]:
    mismatch = [Planned(name=mismatch_case(form, precision), seconds=30) for form in FORMS for precision in PRECISIONS]
    return [*mismatch, *(Planned(name=learning_case(form, replays=replays), seconds=90) for form, replays in _LEARNED)]


_LEARNED: Final = ((DENSE, True), (QWEN, True), (QWEN, False))


def measure(seed: int, progress: Progress) -> Measurement:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="echo-experts-") as directory:
        text = read_text()
        for form in FORMS:
            cases = [mismatch_case(form, precision) for precision in PRECISIONS]
            if any(map(progress.wants, cases)):
                base = made(form, Path(directory) / form.name, text, seed)
            for case, precision in zip(cases, PRECISIONS, strict=True):
                if progress.wants(case):
                    rows.append({"case": case, **mismatch(settings_of(base), precision, text, seed)})
                    progress.done(case, rows[-1])
        for form, replays in _LEARNED:
            case = learning_case(form, replays=replays)
            if progress.wants(case):
                bases = [
                    equal(form, Path(directory) / f"{form.name} {one}", text, one) for one in range(seed, seed + SEEDS)
                ]
                learned = [
                    learning(settings_of(base), text, seed + number, replays=replays)
                    for number, base in enumerate(bases)
                ]
                rows.append({"case": case, **over_seeds(learned)})
                progress.done(case, rows[-1])
    return Measurement(headline=headline(rows), rows=rows)


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest mismatch with and without replay, each divided by the dense model's. For learning, return the
    mean gain of the mixture of experts divided by the dense model's, and the difference of the two gains with its
    standard error.
    """
    by_case = {row["case"]: row for row in rows}
    found: dict[str, Any] = {}
    for form in (QWEN, GPT_OSS):
        for precision in PRECISIONS:
            row, dense = by_case.get(mismatch_case(form, precision)), by_case.get(mismatch_case(DENSE, precision))
            if row and dense:
                for kind in ("own_routes", "replayed"):
                    name = f"mismatch_over_dense_{kind}"
                    found[name] = max(
                        found.get(name, 0.0), row[f"mismatch_kl_{kind}"] / dense["mismatch_kl_own_routes"]
                    )
    row, dense = by_case.get(learning_case(QWEN, replays=True)), by_case.get(learning_case(DENSE, replays=True))
    if row and dense:
        found["moe_gain_over_dense"] = row["gain"] / dense["gain"]
        found["moe_gain_minus_dense"] = row["gain"] - dense["gain"]
        found["moe_gain_minus_dense_error"] = float(np.hypot(row["gain_error"], dense["gain_error"]))
    return found


def over_seeds(learned: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the mean of each result over the seeds. For the gain, add its standard error and the gain of each seed."""
    gains = np.array([of_seed["gain"] for of_seed in learned])
    return {
        "seeds": len(learned),
        **{name: float(np.mean([of_seed[name] for of_seed in learned])) for name in learned[0]},
        "gain_error": float(gains.std(ddof=1) / np.sqrt(len(gains))),
        "gains": gains.tolist(),
    }


def read_text() -> NDArray[np.uint8]:
    files = sorted(Path(echo_shared.__file__).parent.rglob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def pieces(text: NDArray[np.uint8], rng: np.random.Generator, count: int, length: int) -> NDArray[np.int64]:
    """Return `count` passages of the text from random places, as token ids [count, length]."""
    begins = rng.integers(0, len(text) - length, count)
    return np.stack([text[begin : begin + length] for begin in begins]).astype(np.int64)


def made(form: Form, directory: Path, text: NDArray[np.uint8], seed: int) -> Path:
    """Return the directory of a model of this architecture that has learned the text in READ_STEPS steps."""
    reader = ReadingModel(form, text, seed, options=form.options, width=WIDTH, layers=LAYERS)
    for _ in range(READ_STEPS):
        reader.step()
    reader.model.save_pretrained(directory)
    return directory


def equal(form: Form, directory: Path, text: NDArray[np.uint8], seed: int) -> Path:
    """Return the directory of a small model that has learned the text until its held-out loss is at most LEVEL."""
    if directory.exists():
        return directory
    options = {**form.options, **form.small}
    reader = ReadingModel(form, text, seed, options=options, width=LEARNING_WIDTH, layers=LEARNING_LAYERS)
    for _ in range(LEVEL_STEPS // LEVEL_EVERY):
        for _ in range(LEVEL_EVERY):
            reader.step()
        if reader.held_out_loss() <= LEVEL:
            reader.model.save_pretrained(directory)
            return directory
    raise RuntimeError(f"{form.name} with seed {seed} does not reach a loss of {LEVEL} in {LEVEL_STEPS} steps")


class ReadingModel:
    """A model that learns to continue the text."""

    def __init__(
        self, form: Form, text: NDArray[np.uint8], seed: int, *, options: dict[str, Any], width: int, layers: int
    ) -> None:
        torch.manual_seed(seed)
        size = {"hidden_size": width, "head_dim": width // 8, "num_hidden_layers": layers}
        config = getattr(transformers, f"{form.config}Config")(**_COMMON, **size, **options)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._balance = {} if form is DENSE else {"output_router_logits": True}
        self._text = text
        self._rng = np.random.default_rng(seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=READ_RATE)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        self._optimizer.param_groups[0]["lr"] = READ_RATE * min(1.0, self._steps / READ_WARMUP)
        ids = torch.from_numpy(pieces(self._text, self._rng, READ_ROWS, READ_TOKENS))
        self._optimizer.zero_grad(set_to_none=True)
        self.model(input_ids=ids, labels=ids, **self._balance).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on passages of the text that are the same for all models, in nats per byte."""
        ids = torch.from_numpy(pieces(self._text, np.random.default_rng(HELD_OUT), HELD_OUT, READ_TOKENS))
        return float(self.model(input_ids=ids, labels=ids).loss)


def settings_of(base: Path) -> LearnerSettings:
    return LearnerSettings(
        base_dir=base,
        seed=0,
        temperature=1.0,
        max_tokens=NEW_TOKENS,
        stop_ids=(),
        training=TrainingConfig(lora_rank=16, lora_alpha=32, lora_targets="attention", learning_rate=2e-3),
        learner=LearnerConfig(device="cpu", precision="float32", micro_batch_tokens=2_048),
    )


class Engine:
    """A simulated node's engine of this precision, which samples with a learner's adapter."""

    def __init__(self, settings: LearnerSettings, precision: str) -> None:
        self._policy = Policy.load(settings, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        if precision == "q8_0":
            _round_weights(self._policy)

    def sample(self, weights: dict[str, Tensor], requests: Sequence[GroupRequest]) -> list[FinishedRollout]:
        policy = self._policy
        with policy.holding(weights), policy.autocast():
            return list(sample_groups(policy.model, requests, routers=policy.routers))


@torch.no_grad()
def _round_weights(policy: Policy) -> None:
    """Round the base's matrices to 8 bits in blocks of 32, except those of the routers, as llama.cpp does."""
    for name, parameter in policy.model.named_parameters():
        is_router = name.endswith(("gate.weight", "router.weight"))
        if parameter.dim() > 1 and not parameter.requires_grad and not is_router:
            parameter.copy_(in_blocks(parameter, Symmetric(8)))


def requests_of(prompts: NDArray[np.int64], seed: int, *, size: int, max_tokens: int) -> list[GroupRequest]:
    return [
        replace(
            group_request(
                number,
                prompt.astype(np.int32),
                seed=derive_seed("experts", seed, number),
                indices=range(size),
                max_tokens=max_tokens,
            ),
            returns_routes=True,
        )
        for number, prompt in enumerate(prompts)
    ]


def mismatch(settings: LearnerSettings, precision: str, text: NDArray[np.uint8], seed: int) -> dict[str, Any]:
    """Measure how far a float32 learner's log-probabilities differ from those of an engine of this precision, with and
    without replay of the engine's routes. Return the case's row.
    """
    policy = Policy.load(settings)
    prompts = pieces(text, np.random.default_rng([seed, 1]), PROMPTS, PROMPT_TOKENS)
    requests = requests_of(prompts, seed, size=SIZE, max_tokens=NEW_TOKENS)
    rollouts = Engine(settings, precision).sample(policy.published(), requests)
    (batch,) = build_micro_batches(_weighted(requests, rollouts), micro_batch_tokens=10**6)
    with torch.no_grad():
        own = policy.logprobs(replace(batch, routes_TB=None))
        row = {"tokens": len(own), **_differences("own_routes", own, batch)}
        if batch.routes_TB is not None:
            row |= _route_differences(policy, batch)
            row |= _differences("replayed", policy.logprobs(batch), batch)
    return row


def _weighted(requests: Sequence[GroupRequest], rollouts: Sequence[FinishedRollout]) -> list[WeightedGroup]:
    return [
        WeightedGroup(
            prompt_ids=request.prompt_ids,
            rollouts=tuple(
                WeightedRollout(
                    completion_ids=rollout.completion_ids,
                    loss_mask=np.ones(len(rollout.completion_ids), bool),
                    behavior_logprobs=rollout.behavior_logprobs,
                    advantages=np.zeros(len(rollout.completion_ids)),
                    weight=0.0,
                    routes=rollout.routes,
                )
                for rollout in rollouts
                if rollout.group_id == request.group_id
            ),
        )
        for request in requests
    ]


def _differences(kind: str, logprobs_N: Tensor, batch: MicroBatch) -> dict[str, float]:
    errors_N = (logprobs_N - batch.behavior_logprobs_N).double()
    return {
        f"mismatch_kl_{kind}": float((errors_N.expm1() - errors_N).mean()),
        f"nats_99_9_{kind}": float(errors_N.abs().quantile(0.999)),
    }


def _route_differences(policy: Policy, batch: MicroBatch) -> dict[str, float]:
    """Return three shares: of routes in which learner and engine choose different experts, of tokens with such a route,
    and of the engine's routes that the learner cannot replay.
    """
    routers, given_TB = policy.routers, batch.routes_TB
    assert routers is not None and given_TB is not None
    with routers.recording() as recorded:
        policy.states(replace(batch, routes_TB=None))
    given_TMK = given_TB.unflatten(1, (routers.num_layers, routers.top_k))
    known_T = given_TMK[:, 0, 0] != NO_ROUTE
    own_TMK = torch.stack(recorded, dim=1).to(torch.uint8)
    differ_TM = (own_TMK.sort(-1).values != given_TMK.sort(-1).values).any(-1)[known_T]
    replay = Replay(given_TMK)
    with routers.replaying(replay):
        policy.states(replace(batch, routes_TB=None))
    return {
        "routes_differ": float(differ_TM.float().mean()),
        "tokens_differ": float(differ_TM.any(dim=1).float().mean()),
        "routes_refused": float(torch.stack(replay.refused)[:, known_T].float().mean()),
    }


def learning(settings: LearnerSettings, text: NDArray[np.uint8], seed: int, *, replays: bool) -> dict[str, float]:
    """Train a model with GRPO. Return the mean rewards of the first and of the last steps, and their difference (the
    gain).
    """
    policy, engine = Policy.load(settings), Engine(settings, "bf16")
    optimizer = make_optimizer(policy, settings.training)
    rewards, mismatches = [], []
    for step in range(STEPS):
        prompts = pieces(text, np.random.default_rng([seed, 2, step]), LEARNED_GROUPS, PROMPT_TOKENS)
        requests = requests_of(prompts, seed * STEPS + step, size=LEARNED_SIZE, max_tokens=LEARNED_TOKENS)
        rollouts = engine.sample(policy.published(), requests)
        groups = [
            TrainingGroup(
                prompt_ids=request.prompt_ids,
                rollouts=tuple(
                    _scored(rollout, replays=replays) for rollout in rollouts if rollout.group_id == request.group_id
                ),
            )
            for request in requests
        ]
        metrics = train_step(policy, optimizer, groups, settings)
        rewards.append(metrics["mean_reward"])
        mismatches.append(metrics["mismatch_kl"])
    first, last = float(np.mean(rewards[:ENDS])), float(np.mean(rewards[-ENDS:]))
    return {"reward_first": first, "reward_last": last, "gain": last - first, "mismatch_kl": float(np.mean(mismatches))}


def _scored(rollout: FinishedRollout, *, replays: bool) -> TrainingRollout:
    count = len(rollout.completion_ids)
    return TrainingRollout(
        **{**RolloutPayload.of(rollout).content(), "routes": rollout.routes if replays else b""},
        loss_mask=np.ones(count, bool),
        reward=float(np.isin(rollout.completion_ids, _VOWELS).mean()),
    )
