from __future__ import annotations

import json
from typing import Any

import pytest

from echo_hub.lifecycle.gguf.rules import RULES, rules_for
from tests.echo_hub.lifecycle.gguf import conftest


@pytest.mark.parametrize("rule", conftest.RULES)
def test_the_likely_rule_comes_first_and_all_follow(rule: str) -> None:
    state: dict[str, Any] = json.loads(conftest.byte_tokenizer(rule).to_str())
    found = rules_for(state)
    assert found[0] == rule and sorted(found) == sorted(RULES)


def test_rules_that_keep_words_whole_come_first_if_the_tokenizer_does() -> None:
    state: dict[str, Any] = json.loads(conftest.byte_tokenizer("qwen2").to_str())
    state["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\p{N}{1,3}"
    assert rules_for(state)[0] != "llama-bpe"
    state["model"]["ignore_merges"] = True
    assert rules_for(state)[0] == "llama-bpe"
