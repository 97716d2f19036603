from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from echo_hub.config.file import load_config
from echo_hub.config.operation_sections import MetricsConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.sinks import texts as texts_module
from echo_hub.sinks.texts import SampleTexts
from echo_hub.store.keeping import Keeping
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from tests.echo_hub.written_rollouts import REWARDS, TEXTS, write_rollouts

CODEC = PromptCodec.load(resolve_base("builtin:tiny"))


@cache
def problems() -> Problems:
    return Problems.of_run(load_config(None, {}), CODEC)


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "STEPS_APART", 1)


def texts(store: Store, **settings: int) -> SampleTexts:
    return SampleTexts(MetricsConfig(**settings), store=store, codec=CODEC, problems=problems())


def test_from_the_least_rewarded_to_the_most(store: Store) -> None:
    write_rollouts(store, CODEC)
    found = texts(store, texts=64).of_step(1)
    assert [text.reward for text in found] == sorted(REWARDS[:4])
    assert {text.completion.partition("<eos>")[0] for text in found} == set(TEXTS[:4])
    assert all("+" in text.prompt for text in found)
    two = texts(store, texts=2).of_step(1)
    assert [text.reward for text in two] == [min(REWARDS[:4]), max(REWARDS[:4])]
    assert [text.reward for text in texts(store, texts=1).of_step(1)] == [max(REWARDS[:4])]


def test_texts_are_off_by_default_and_rare(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rollouts(store, CODEC)
    assert texts(store).of_step(1) == []
    assert texts(store, texts=4).of_step(7) == []
    monkeypatch.setattr(texts_module, "STEPS_APART", 2)
    assert texts(store, texts=4).of_step(1) == []


def test_rollouts_without_kept_tokens_have_no_text(store: Store) -> None:
    write_rollouts(store, CODEC)
    store.keeping = replace(store.keeping, share=0.0)
    assert texts(store, texts=4).of_step(1) == []
    store.keeping = Keeping()
    assert len(texts(store, texts=4).of_step(1)) == 4


@pytest.mark.parametrize("keeping", [{"share": 0.0}, {"max_bytes": 0}])
def test_a_run_that_keeps_no_text_has_none_to_show(keeping: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.texts|not valid"):
        load_config(None, {"metrics": {"texts": 1}, "keeping": keeping})
