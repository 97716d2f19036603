from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.models import Shape
from benchmarks.learner.cases import CASES, Case, fill_adapter, make_batch, make_model
from echo_hub.run.base_model import resolve_base

SHAPE = Shape(hidden=64, layers=1, heads=1, key_value_heads=1, head_dim=64, intermediate=128, vocabulary=50)
TINY = replace(CASES[0], shape=SHAPE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lengths_have_the_cases_spread(case: Case) -> None:
    lengths = case.lengths(seed=3)
    assert len(lengths) == case.groups * case.group_size
    assert max(lengths) == case.spread * min(lengths) == case.longest


def test_cases_with_a_base_in_the_box_have_its_shape() -> None:
    for case in (case for case in CASES if case.base):
        config = json.loads((resolve_base(case.base) / "config.json").read_text())
        shape = case.shape
        assert shape.vocabulary == config["vocab_size"] and shape.layers == config["num_hidden_layers"]
        assert (shape.hidden, shape.intermediate) == (config["hidden_size"], config["intermediate_size"])
        assert case.prompt_tokens + case.longest <= config["max_position_embeddings"]


def test_a_seed_gives_the_same_batch() -> None:
    first, again, other = make_batch(TINY, 0), make_batch(TINY, 0), make_batch(TINY, 1)
    assert np.array_equal(first[0].rollouts[0].completion_ids, again[0].rollouts[0].completion_ids)
    assert not np.array_equal(first[0].prompt_ids, other[0].prompt_ids)
    assert [len(r.completion_ids) for group in first for r in group.rollouts] == TINY.lengths(0)


def test_the_model_has_the_cases_shape(tmp_path: Path) -> None:
    directory = make_model(TINY, tmp_path, 0)
    assert make_model(replace(TINY, checkpointing=True), tmp_path, 0) == directory
    model = AutoModelForCausalLM.from_pretrained(directory)
    linear = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(module.weight.numel() for module in linear)
    tokens, operations = TINY.work(0)
    inputs = tokens + TINY.groups * TINY.prompt_tokens
    assert operations == 4 * (inputs * weights + tokens * model.lm_head.weight.numel())


def test_adapters_of_one_seed_are_equal_in_any_order() -> None:
    names = {"b": (3, 2), "a": (2, 4)}
    first = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in names.items()}
    second = {name: torch.nn.Parameter(torch.zeros(names[name])) for name in sorted(names)}
    fill_adapter(first, 0)
    fill_adapter(second, 0)
    assert all(torch.equal(first[name], second[name]) and first[name].any() for name in names)
