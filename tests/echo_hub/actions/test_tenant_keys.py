from __future__ import annotations

from echo_hub.actions.tenant_keys import key_lines, tinker_key, token_in


def test_both_spellings_name_the_same_token() -> None:
    assert tinker_key("echo_abc") == "tml-echo_abc"
    assert token_in("tml-echo_abc") == token_in("echo_abc") == "echo_abc"
    assert token_in("") == ""


def test_owners_learn_both_spellings_and_who_sees_prompts() -> None:
    tinker, openai, advice = key_lines("echo_abc")
    assert tinker.endswith("TINKER_API_KEY=tml-echo_abc") and openai.endswith("OPENAI_API_KEY=echo_abc")
    assert "personal data" in advice and "strangers" in advice
