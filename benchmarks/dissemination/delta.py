"""Size of a policy version: adapters of real training runs, encoded against versions 1, 4 and 16 steps before.

The hub's own sampler and learner train two models at each learning rate: the built-in model on its sums, and a random
model of 512 x 4 on a reward that any model can raise, the share of ids from the lower half of the vocabulary. Adapters
are the learner's exports in float32, and the same rounded to bfloat16.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.requests import group_request
from benchmarks.learning.virtual_run import score_of
from echo_hub.config.sections import HubConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring.problems import Problems
from echo_shared import delta, torch_sampler
from echo_shared.adapter import CONFIG_FILE, WEIGHTS_FILE
from echo_shared.draws import derive_seed

LEARNING_RATES: Final = (1e-5, 1e-4)
AHEAD: Final = (1, 4, 16)
STEPS: Final = 40
"""Steps of a run. Its last version is encoded."""
GROUP_SIZE: Final = 4
REPEATS: Final = 5
"""Repetitions, of which the fastest counts: the others include other work of the machine."""
MID: Final[dict[str, Any]] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
MID_TOKENS: Final = 8
"""Tokens of a prompt, and of a completion."""
SUBJECTS: Final = ("tiny", "mid")
RUN_S: Final = {"tiny": 25.0, "mid": 35.0}
"""Expected time of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, and its prompt and reward by group."""

    name: str
    base: Path
    stop_ids: tuple[int, ...]
    groups_per_step: int
    max_tokens: int
    prompt: Callable[[int], NDArray[np.int32]]
    reward: Callable[[int, NDArray[np.int32]], float]


def plan() -> list[Planned]:
    return [
        Planned(name=_name(subject, rate), seconds=RUN_S[subject]) for subject in SUBJECTS for rate in LEARNING_RATES
    ]


def measure(seed: int, progress: Progress) -> list[dict[str, Any]]:
    """Measure a row for each model, learning rate, dtype and number of steps between a version and its parent.

    Ratios are bytes over those of the raw adapter's files. `encode_mb_s` and `decode_mb_s` count raw bytes of the delta
    in one thread, with file access. `exact` is True if every file of keyframe and delta came back unchanged.
    """
    disable_progress_bar()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for subject in (_tiny(seed), _mid(directory / "mid", seed)):
            for rate in LEARNING_RATES:
                if not progress.wants(_name(subject.name, rate)):
                    continue
                versions = _train(subject, rate, seed, directory / subject.name / f"{rate:g}")
                for dtype, make in (("float32", lambda version: version), ("bfloat16", _rounded)):
                    of_dtype = {step: make(version) for step, version in versions.items()}
                    for row in _rows(of_dtype, directory):
                        rows.append({"model": subject.name, "lr": rate, "dtype": dtype, **row})
                progress.done(_name(subject.name, rate), _told(rows))
    return rows


def _name(subject: str, rate: float) -> str:
    return f"delta, {subject}, learning rate {rate:g}"


def _told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Delta ratios of the newest run's last version against the version before."""
    newest = [row for row in rows if (row["model"], row["lr"]) == (rows[-1]["model"], rows[-1]["lr"])]
    return {f"{row['dtype']} delta_ratio": row["delta_ratio"] for row in newest if row["ahead"] == 1}


def _tiny(seed: int) -> Subject:
    base = resolve_base("builtin:tiny")
    codec = PromptCodec.load(base)
    config = _config(seed, rate=1.0, max_tokens=6)
    problems = Problems.of_run(config, codec)
    return Subject(
        name="tiny",
        base=Path(base),
        stop_ids=codec.stop_ids,
        groups_per_step=16,
        max_tokens=config.sampling.max_tokens,
        prompt=problems.prompt_ids,
        reward=lambda group, ids: score_of(problems.respond(group, [ids])),
    )


def _mid(base: Path, seed: int) -> Subject:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(Qwen3Config(**MID)).save_pretrained(base)
    vocabulary = MID["vocab_size"]

    def prompt(group: int) -> NDArray[np.int32]:
        rng = np.random.default_rng(derive_seed("delta", seed, group))
        return rng.integers(1, vocabulary, MID_TOKENS).astype(np.int32)

    return Subject(
        name="mid",
        base=base,
        stop_ids=(0,),
        groups_per_step=4,
        max_tokens=MID_TOKENS,
        prompt=prompt,
        reward=lambda _, ids: float(np.mean(ids < vocabulary // 2)),
    )


def _config(seed: int, *, rate: float, max_tokens: int) -> HubConfig:
    return HubConfig.model_validate(
        {
            "run": {"mode": "colocated", "seed": seed},
            "sampling": {"max_tokens": max_tokens},
            "training": {"learning_rate": rate, "group_size": GROUP_SIZE},
            "learner": {"threads": 1, "device": "cpu"},
            "evaluation": {"problems": 16},
        }
    )


def _train(subject: Subject, rate: float, seed: int, directory: Path) -> dict[int, Path]:
    """Train for `STEPS`. Returns the exported versions that are compared, by step."""
    config = _config(seed, rate=rate, max_tokens=subject.max_tokens)
    settings = LearnerSettings.of_run(config, base_dir=subject.base, stop_ids=subject.stop_ids)
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    versions = {}
    for step in range(1, STEPS + 1):
        groups = range((step - 1) * subject.groups_per_step, step * subject.groups_per_step)
        train_step(policy, optimizer, list(_sampled(policy, subject, groups)), settings)
        if STEPS - step in (0, *AHEAD):
            versions[step] = directory / f"{step}"
            versions[step].mkdir(parents=True)
            policy.save_adapter(versions[step])
    return versions


def _sampled(policy: Policy, subject: Subject, groups: Iterable[int]) -> Iterator[TrainingGroup]:
    requests = [
        group_request(
            group,
            subject.prompt(group),
            indices=range(GROUP_SIZE),
            seed=derive_seed("delta", subject.name, group),
            max_tokens=subject.max_tokens,
            stop_ids=subject.stop_ids,
        )
        for group in groups
    ]
    rollouts: dict[int, list[TrainingRollout]] = {}
    for rollout in torch_sampler.sample_groups(policy.model, requests):
        ids = rollout.completion_ids
        rollouts.setdefault(rollout.group_id, []).append(
            TrainingRollout(
                **rollout.content(),
                loss_mask=np.ones(len(ids), bool),
                reward=subject.reward(rollout.group_id, ids),
            )
        )
    for group, of_group in rollouts.items():
        yield TrainingGroup(prompt_ids=subject.prompt(group), rollouts=tuple(of_group))


def _rounded(version: Path) -> Path:
    """Round an adapter to bfloat16."""
    directory = version.with_name(f"{version.name}-bfloat16")
    directory.mkdir()
    weights = {name: weight.bfloat16() for name, weight in load_file(version / WEIGHTS_FILE).items()}
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copy(version / CONFIG_FILE, directory)
    return directory


def _rows(versions: dict[int, Path], scratch: Path) -> Iterator[dict[str, Any]]:
    newest = versions[STEPS]
    raw_bytes = sum(path.stat().st_size for path in newest.iterdir())
    keyframe_bytes, _, _, keyframe_exact = _coded(newest, None, scratch)
    for ahead in AHEAD:
        delta_bytes, encode_s, decode_s, exact = _coded(newest, versions[STEPS - ahead], scratch)
        yield {
            "ahead": ahead,
            "adapter_bytes": raw_bytes,
            "keyframe_ratio": keyframe_bytes / raw_bytes,
            "delta_ratio": delta_bytes / raw_bytes,
            "encode_mb_s": raw_bytes / encode_s / 1e6,
            "decode_mb_s": raw_bytes / decode_s / 1e6,
            "exact": exact and keyframe_exact,
        }


def _coded(version: Path, parent: Path | None, scratch: Path) -> tuple[int, float, float, bool]:
    """Bytes of the payload, seconds to encode and to decode it, and True if all files came back."""
    payload, decoded = scratch / "payload", scratch / "decoded"
    shutil.rmtree(decoded, ignore_errors=True)
    encode_s = _fastest(lambda: delta.encode(version, payload, parent=parent))
    files = {path.name: path.read_bytes() for path in version.iterdir()}
    sizes = {name: len(content) for name, content in files.items()}

    def decode() -> None:
        with payload.open("rb") as stream:
            delta.decode(stream, decoded, files=sizes, parent=parent)

    decode_s = _fastest(decode)
    exact = files == {path.name: path.read_bytes() for path in decoded.iterdir()}
    return payload.stat().st_size, encode_s, decode_s, exact


def _fastest(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
