from __future__ import annotations

from dataclasses import replace

from echo_hub.config.sections import HubConfig, ModelConfig, RunConfig
from echo_hub.config.task_sections import TaskConfig
from echo_hub.lifecycle.model_card import GgufCard, TrainingFacts, model_card
from echo_hub.lifecycle.reward_curve import RewardPoint
from echo_hub.store.run_facts import RunFacts
from echo_shared.records.run import Evaluation, EvaluationKind


def test_the_card_describes_the_adapter_and_its_origin() -> None:
    config = HubConfig(model=ModelConfig(base="owner/name@abc"), run=RunConfig(name="spring"))
    card = model_card(config, policy_version=7, lineage=("version 3 of a (id)", "the adapter x"), base_id="owner/name")
    assert 'base_model: "owner/name"\n' in card
    assert "# spring, version 7" in card
    assert "- version 3 of a (id)\n  - which began with the adapter x" in card
    assert "began" not in model_card(config, policy_version=7, lineage=(), base_id=None)


def test_names_are_text_and_paths_stay_here() -> None:
    config = HubConfig(model=ModelConfig(base="/home/me/model"), run=RunConfig(name="a\n---\n# <b> [x](y)"))
    card = model_card(config, policy_version=1, lineage=(), base_id=None)
    assert "its path at the export" in card and "--base owner/name" in card
    assert "/home/me" not in card and "base_model:" not in card
    assert "\n# \\<b\\>" not in card and "a --- \\# \\<b\\> \\[x\\](y)" in card


def test_the_card_shows_the_text_around_prompts() -> None:
    config = HubConfig(task=TaskConfig(system_prompt="Be brief.\nVery.", prompt_suffix="\nAnswer:"))
    card = model_card(config, policy_version=1, lineage=(), base_id="owner/name")
    assert '- system prompt: "Be brief.\\nVery."\n- text behind each problem: "\\nAnswer:"' in card
    assert "its path at the export" not in card and "AutoPeftModelForCausalLM" in card


def test_the_card_says_who_sampled_how_much_and_what_it_gained() -> None:
    measured = Evaluation(
        policy_version=0,
        kind=EvaluationKind.GREEDY,
        num_problems=64,
        samples=1,
        num_unscored=0,
        accuracy=0.25,
        accuracy_error=0.05,
        pass_at={},
        mean_reward=0.25,
        mean_tokens=9.0,
        share_truncated=0.0,
        seconds=1.0,
        evaluated_at=1.0,
    )
    facts = RunFacts(
        num_nodes=7,
        num_owners=5,
        rollouts=1_234,
        tokens=98_765,
        evaluations=(measured, replace(measured, policy_version=7, accuracy=0.75)),
    )
    curve = [RewardPoint(step=step, reward=step / 50, smoothed=step / 100) for step in range(1, 51)]
    training = TrainingFacts(run=facts, curve=curve)
    card = model_card(HubConfig(), policy_version=7, lineage=(), base_id=None, training=training)
    assert "1,234 rollouts with 98,765 tokens, sampled by 7 machines of 5 volunteers." in card
    assert "![Mean reward by step](reward.png)" in card and card.count("\n| ") == 9
    assert "| 1 | 0.010 |" in card and "| 50 | 0.500 |" in card
    assert "- version 0: greedy 25.0%" in card and "- version 7: greedy 75.0%" in card
    empty = TrainingFacts(run=RunFacts(num_nodes=0, num_owners=0, rollouts=0, tokens=0, evaluations=()))
    assert "Training" not in model_card(HubConfig(), policy_version=7, lineage=(), base_id=None, training=empty)


def test_the_card_of_a_gguf_file_shows_how_to_talk_with_it() -> None:
    gguf = GgufCard(
        file="a-v7-q8_0.gguf", precision="q8_0", is_chat=True, temperature=0.7, ollama_name="a:v7", notes=("N.",)
    )
    card = model_card(HubConfig(), policy_version=7, lineage=(), base_id="owner/name", kind="gguf", gguf=gguf)
    assert "library_name: gguf\ntags: [gguf, llama.cpp, reinforcement-learning, echo]" in card
    assert "llama-cli -m a-v7-q8_0.gguf --jinja --temp 0.7\nollama create a:v7 -f Modelfile && ollama run a:v7" in card
    assert "The model owner/name with a merged LoRA adapter" in card and "\nN.\n" in card
    assert "from_pretrained" not in card
