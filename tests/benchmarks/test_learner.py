from __future__ import annotations

import json

from benchmarks.learner import CASES
from echo_hub.run.base_files import resolve_base


def test_cases_with_a_base_in_the_box_have_its_shape() -> None:
    for case in (case for case in CASES if case.base):
        config = json.loads((resolve_base(case.base) / "config.json").read_text())
        shape = case.shape
        assert shape.vocabulary == config["vocab_size"] and shape.layers == config["num_hidden_layers"]
        assert (shape.hidden, shape.intermediate) == (config["hidden_size"], config["intermediate_size"])
        assert case.prompt_tokens + case.longest <= config["max_position_embeddings"]
