import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_base.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_base", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def greedy(model: torch.nn.Module, codec: PromptCodec, prompts: list[str], max_tokens: int) -> list[str]:
    """Return greedy completions of these prompts, which must be equally long."""
    ids_BT = torch.tensor([codec.encode_prompt(prompt).tolist() for prompt in prompts])
    start = ids_BT.shape[1]
    for _ in range(max_tokens):
        with torch.no_grad():
            next_B = model(input_ids=ids_BT).logits[:, -1].argmax(-1)
        ids_BT = torch.cat([ids_BT, next_B[:, None]], dim=1)
    rows = [row[: row.index(stop)] if (stop := codec.stop_ids[0]) in row else row for row in ids_BT[:, start:].tolist()]
    return [codec.decode(row) for row in rows]


def test_the_script_reproducibly_makes_a_loadable_model(script: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "two"):
        script.main(out=tmp_path / name, seed=3, learn_steps=2, forget_steps=1, threads=1)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all((one[key] == two[key]).all() for key in one)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert model.dtype == torch.float32
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "one").encode("1=\n")
        == PromptCodec.load(tmp_path / "one").encode_prompt("1=\n").tolist()
    )


def test_the_committed_model_is_the_scripts_architecture_and_tokenizer(script: ModuleType) -> None:
    directory = resolve_base("builtin:tiny")
    tokenizer = script.build_tokenizer()
    committed = AutoModelForCausalLM.from_pretrained(directory)
    assert committed.config.model_type == "qwen3"
    assert committed.num_parameters() == script.build_model(tokenizer).num_parameters() == 800_512
    assert AutoTokenizer.from_pretrained(directory).get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) == len(script.SPECIAL_TOKENS) + 96


def test_the_committed_model_adds_but_not_reliably() -> None:
    directory = resolve_base("builtin:tiny")
    task = make_task("arithmetic", {})
    stream = ProblemStream(task, run_seed=0, heldout_problems=512)
    problems = [stream.heldout(number) for number in range(512)]
    completions = greedy(
        AutoModelForCausalLM.from_pretrained(directory),
        PromptCodec.load(directory),
        [problem.prompt for problem in problems],
        max_tokens=6,
    )
    accuracy = sum(map(task.score, problems, completions)) / len(problems)
    assert 0.3 <= accuracy <= 0.58


@pytest.mark.parametrize(("left", "right"), [(123, 456), (999, 999), (905, 95), (100, 100)])
def test_a_teacher_adds_rightly_or_without_carries_if_it_forgets_all(script: ModuleType, left: int, right: int) -> None:
    rng = random.Random(0)
    assert script.forgetful_sum(left, right, 0.0, rng) == left + right
    digitwise = sum((left // p % 10 + right // p % 10) % 10 * p for p in (1, 10, 100))
    assert script.forgetful_sum(left, right, 1.0, rng) == digitwise


def test_lessons_hold_no_held_out_problem_and_label_the_answer_alone(script: ModuleType) -> None:
    tokenizer = script.build_tokenizer()
    lessons = script.Lessons(tokenizer, random.Random(0))
    ids_BT, labels_BT = lessons.batch(lambda left, right: left + right)
    stream = ProblemStream(make_task("arithmetic", {}), run_seed=0, heldout_problems=script.EXCLUDED_PROBLEMS)
    heldout = {stream.heldout(number).prompt for number in range(script.EXCLUDED_PROBLEMS)}
    for ids, labels in zip(ids_BT, labels_BT, strict=True):
        prompt, answer = tokenizer.decode(ids).replace("<pad>", "").removesuffix("<eos>").split("=")
        assert f"{prompt}=" not in heldout
        assert sum(map(int, prompt.split("+"))) == int(answer)
        learned = labels[labels != script.IGNORED]
        assert tokenizer.decode(learned) == f"{answer}<eos>"
