"""The real sampler, with the built-in model, replies in a conversation. It must draw the same tokens as an
evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.talking.settings import talking_settings
from echo_hub.talking.talker import ReplyPart, Talker
from echo_shared.sampling.torch_sampler import greedy

CONFIG = HubConfig(learner=LearnerConfig(threads=1), training=TrainingConfig(lora_rank=2))


@pytest.fixture(scope="module")
def codec() -> PromptCodec:
    return PromptCodec.load(resolve_base("builtin:tiny"))


@pytest.fixture(scope="module")
def talker(codec: PromptCodec) -> Talker:
    settings = talking_settings(CONFIG, base_dir=resolve_base("builtin:tiny"), codec=codec, device="cpu")
    return Talker.open(settings)


@pytest.fixture(scope="module")
def adapter(talker: Talker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an adapter that changes every answer."""
    directory = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    policy = talker._policy
    policy.save_adapter(directory, {name: torch.randn_like(weight) for name, weight in policy.parameters.items()})
    return directory


def whole(parts: list[ReplyPart], index: int = 0) -> list[int]:
    return [int(token) for part in parts if part.index == index for token in part.ids]


def test_a_greedy_reply_comes_in_parts_and_is_the_sampler_s(talker: Talker, codec: PromptCodec, adapter: Path) -> None:
    prompt = codec.encode_prompt("12+34=")
    parts = list(talker.reply(prompt, adapter=adapter, temperature=0.0, max_tokens=12, seed=0))
    assert len(parts) > 2 and [part.finish for part in parts[:-1]] == [""] * (len(parts) - 1)
    with talker._policy.holding(talker._policy.read_adapter(adapter)):
        (expected,) = greedy(talker._policy.model, [prompt], max_tokens=12, stop_ids=codec.stop_ids)
    assert whole(parts) == expected.tolist()
    assert parts[-1].finish == ("stop" if expected[-1] in codec.stop_ids else "length")


def test_samples_differ_and_repeat_with_their_seed(talker: Talker, codec: PromptCodec, adapter: Path) -> None:
    prompt = codec.encode_prompt("12+34=")

    def drawn(seed: int) -> list[list[int]]:
        parts = list(talker.reply(prompt, adapter=adapter, samples=3, temperature=3.0, max_tokens=8, seed=seed))
        assert sum(bool(part.finish) for part in parts) == 3
        return [whole(parts, index) for index in range(3)]

    first = drawn(1)
    assert len({tuple(one) for one in first}) == 3 and drawn(1) == first and drawn(2) != first


def test_a_version_answers_with_its_adapter_and_the_base_without(
    talker: Talker, codec: PromptCodec, adapter: Path
) -> None:
    prompt = codec.encode_prompt("12+34=")

    def said(chosen: Path | None) -> list[int]:
        return whole(list(talker.reply(prompt, adapter=chosen, temperature=0.0, max_tokens=8, seed=0)))

    base = said(None)
    assert said(adapter) != base and said(None) == base


def test_a_longer_conversation_is_answered_like_a_fresh_one(talker: Talker, codec: PromptCodec) -> None:
    prompt = codec.encode_prompt("12+34=")
    reply = whole(list(talker.reply(prompt, adapter=None, temperature=0.0, max_tokens=4, seed=0)))
    longer = np.concatenate([prompt, np.array(reply, dtype=np.int32), codec.encode_prompt("5+6=")])
    continued = whole(list(talker.reply(longer, adapter=None, temperature=0.0, max_tokens=6, seed=0)))
    talker._kept = None
    assert whole(list(talker.reply(longer, adapter=None, temperature=0.0, max_tokens=6, seed=0))) == continued


def test_a_reply_may_be_abandoned(talker: Talker, codec: PromptCodec) -> None:
    prompt = codec.encode_prompt("12+34=")
    parts = talker.reply(prompt, adapter=None, temperature=1.0, max_tokens=12, seed=0)
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert list(talker.reply(prompt, adapter=None, temperature=0.0, max_tokens=3, seed=0))
