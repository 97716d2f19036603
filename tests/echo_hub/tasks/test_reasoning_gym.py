import random
import subprocess
import sys

import pytest
from reasoning_gym.factory import DATASETS

from echo_hub.tasks.base import Problem
from echo_hub.tasks.reasoning_gym import make_reasoning_gym
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ConfigError

is_solved = RewardBounds().is_solved

REFUSED = {
    "composite",
    "game_of_life_halting",
    "intermediate_integration",
    "polynomial_multiplication",
    "simple_integration",
}
COSTLY = {"arc_agi", "rearc", "codeio", "knight_swap", "figlet_font", "group_anagrams"}
"""Datasets that need a tenth of a second or more per problem; the cheaper ones test the same code."""


@pytest.mark.parametrize("dataset", sorted(DATASETS.keys() - REFUSED - COSTLY))
def test_every_dataset_gives_the_same_problem_for_the_same_seed(dataset: str) -> None:
    task = make_reasoning_gym(dataset, {})
    problem = task.sample(2**64 - 1)
    random.seed(1)
    assert task.sample(2**64 - 1) == problem
    assert problem.prompt == problem.metadata["question"]


@pytest.mark.parametrize(
    "dataset",
    ["chain_sum", "knights_knaves", "sokoban", "spiral_matrix", "n_queens", "string_insertion", "binary_matrix", "ab"],
)
def test_the_datasets_own_answer_is_right_alone_and_in_tags(dataset: str) -> None:
    task = make_reasoning_gym(dataset, {})
    for seed in range(3):
        problem = task.sample(seed)
        answer = problem.metadata["answer"]
        assert task.score(problem, f"  {answer}\n") == 1.0
        assert task.score(problem, f"<answer>no</answer> Wait: <answer>\n{answer} </answer> done") == 1.0
        assert task.score(problem, f"<answer>{answer}</answer> or <answer></answer>") < 1.0
        assert task.score(problem, "") < 1.0


@pytest.mark.parametrize("dataset", ["chain_sum", "gcd", "syllogism", "spiral_matrix", "leg_counting", "countdown"])
def test_an_answer_in_words_is_right_where_no_other_is_meant(dataset: str) -> None:
    task = make_reasoning_gym(dataset, {})
    for seed in range(3):
        problem = task.sample(seed)
        answer = problem.metadata["answer"]
        for said in (f"The answer is {answer}.", f"I think it over.\nFinal answer: **{answer}**"):
            assert task.score(problem, said) == 1.0
        wrong = task.sample(seed + 10).metadata["answer"] + "1"
        for said in (
            f"The answer is {answer} or {wrong}.",
            f"The answer is {wrong}. No, the answer is {answer}.",
            f"The answer is {answer}. The answer is {wrong}.",
            f"The answer is not {answer}.",
            f"The answer is {answer}, {wrong}.",
        ):
            assert task.score(problem, said) == task.score(problem, said.replace("answer", "phrase")) < 1.0


def test_words_around_tags_change_nothing() -> None:
    task = make_reasoning_gym("chain_sum", {})
    problem = task.sample(0)
    said = f"<answer>no</answer> The answer is {problem.metadata['answer']}."
    assert task.score(problem, said) == task.score(problem, "<answer>no</answer>") < 1.0


def test_neighbouring_seeds_share_no_problems() -> None:
    task = make_reasoning_gym("chain_sum", {"min_digits": 4, "max_digits": 4})
    assert len({task.sample(seed).prompt for seed in range(200)}) == 200


def test_options_reach_the_dataset() -> None:
    task = make_reasoning_gym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert all(task.sample(seed).metadata["metadata"]["num_terms"] == 2 for seed in range(20))


def test_an_unknown_dataset_is_answered_with_close_names() -> None:
    with pytest.raises(ConfigError) as caught:
        make_reasoning_gym("knight_knaves", {})
    assert "knights_knaves" in str(caught.value)


@pytest.mark.parametrize("option", ["min_term", "seed", "size"])
def test_an_option_that_the_dataset_does_not_take_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="has no such option") as caught:
        make_reasoning_gym("chain_sum", {option: 1})
    assert f"task.options.{option}" in str(caught.value)
    assert "min_terms" in str(caught.value)


@pytest.mark.parametrize("options", [{"min_terms": 0}, {"min_terms": "two"}, {"min_terms": 5, "max_terms": 2}])
def test_values_that_do_not_fit_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        make_reasoning_gym("chain_sum", options)


@pytest.mark.parametrize("dataset", sorted(REFUSED))
def test_datasets_whose_scorers_cannot_be_trusted_are_refused(dataset: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a task of its own"):
        make_reasoning_gym(dataset, {})


@pytest.mark.parametrize("dataset", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
@pytest.mark.parametrize(
    "code",
    [
        "print('ran', flush=True)",
        "[print('ran', flush=True)]",
        "<answer>[x for x in [print('ran', flush=True)]]</answer>",
        "(lambda: print('ran'))()",
        "f'{print(\"ran\")}'",
        "[9**9**9]",
        "().__class__",
        "oracle_answer",
        "[oracle_answer]",
        "(" * 5_000,
    ],
)
def test_a_completion_never_runs_as_code(dataset: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = make_reasoning_gym(dataset, {})
    assert task.score(task.sample(0), code) == 0.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("code", ["__import__('os').getpid()", "9**9**9", "9**-9", "factorial(9)", "9!", "S('9')"])
def test_sums_are_sums_and_nothing_more(code: str) -> None:
    task = make_reasoning_gym("countdown", {})
    assert task.score(task.sample(0), code) == 0.0


def test_plain_data_and_plain_sums_reach_the_datasets_scorer() -> None:
    task = make_reasoning_gym("spiral_matrix", {})
    problem = task.sample(0)
    assert task.score(problem, str(problem.metadata["answer"].split())) == 0.1
    countdown = make_reasoning_gym("countdown", {})
    sums = Problem(prompt="", metadata={"metadata": {"numbers": [2, 3, 8], "target": 22}})
    assert countdown.score(sums, "(3*8) - 2") == 1.0
    assert countdown.score(sums, "3*8") < 0.1


def test_reasoning_gym_is_loaded_only_when_it_is_used() -> None:
    code = (
        "import sys, echo_hub.tasks.registry as r; r.make_task('arithmetic', {}); print('reasoning_gym' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("dataset", ["prime_factorization", "boxnet"])
@pytest.mark.parametrize("completion", ["", "no idea", "[1]", "7", "2 × x", "{", "2 3"])
def test_an_answer_without_the_form_that_a_scorer_needs_earns_little_and_is_no_error(
    dataset: str, completion: str
) -> None:
    task = make_reasoning_gym(dataset, {})
    assert task.score(task.sample(0), completion) <= 0.05


def test_answers_in_the_form_that_a_scorer_needs_reach_it() -> None:
    task = make_reasoning_gym("prime_factorization", {})
    problem = task.sample(0)
    assert task.score(problem, f"<answer>{problem.metadata['answer']}</answer>") == 1.0
    boxes = make_reasoning_gym("boxnet", {})
    assert boxes.score(boxes.sample(0), "<answer>{}</answer>") == 0.05


PROVEN = {
    "knights_knaves": {"n_people": 2},
    "sokoban": {"max_w": 7, "max_h": 7, "max_boxes": 4},
}
SEEDS = range(40)


@pytest.mark.parametrize("dataset", PROVEN)
def test_the_right_answer_in_tags_earns_one_and_wrong_ones_less(dataset: str) -> None:
    task = make_reasoning_gym(dataset, PROVEN[dataset])
    for seed in SEEDS:
        problem = task.sample(seed)
        right, wrong = problem.metadata["answer"], wrong_answers(dataset, problem)
        for other in wrong:
            assert not is_solved(task.score(problem, f"<answer>{other}</answer>")), (seed, other)
        assert task.score(problem, f"<think>Let me see.</think>\n<answer>{right}</answer>") == 1.0
        assert not is_solved(task.score(problem, f"<answer>{right}</answer> No: <answer>{wrong[0]}</answer>"))


def wrong_answers(dataset: str, problem: Problem) -> list[str]:
    """Return wrong answers to the problem: wrong in one part, wrong in all parts, or right only in form."""
    right = problem.metadata["answer"]
    if dataset == "sokoban":
        return [right[:-1], "", "?", "the boxes are on their goals", "<answer>"]
    terms = problem.metadata["metadata"]["knight_knave_terms"]
    knight, knave = terms["knight"], terms["knave"]
    one = right.replace(knight, knave, 1) if knight in right else right.replace(knave, knight, 1)
    forms = [f"Zoe is a {knight}, and Sam is a {knave}", "", knight, "and", f"is a {knight}, is a {knave}"]
    return [one, right.replace(knight, "*").replace(knave, knight).replace("*", knave), *forms]


@pytest.mark.parametrize("dataset", PROVEN)
@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os')._exit(1)",
        "9**9**9**9",
        "(" * 50_000,
        "UDLR" * 50_000,
        "Zoe is a knight, " * 5_000,
        "\x00\ud7ff" * 1_000,
        "<answer>" * 1_000,
    ],
)
def test_hostile_answers_earn_nothing_to_speak_of(dataset: str, hostile: str) -> None:
    task = make_reasoning_gym(dataset, PROVEN[dataset])
    assert not is_solved(task.score(task.sample(0), hostile))
    assert not is_solved(task.score(task.sample(0), f"<answer>{hostile}</answer>"))


AUDIT = """
import os, sys
from echo_hub.tasks.reasoning_gym import make_reasoning_gym
MARK = "marked_by_the_test"
ran = []

def watch(event, arguments):
    if event == "exec" and MARK in str((arguments[0].co_names, arguments[0].co_consts)):
        ran.append(arguments[0])

sys.addaudithook(watch)
FORMS = ["{}", "{}()", "[{}]", "['a', {}()]", "1+{}", "({})", '{{"a": {}}}', "[[1, {}()]]", "{}*x**2", "x={}", "{}/2",
         "1 2 {}", "1,{}", "({}, 1)", "!!python/object/apply:os.system ['{}']", "{}\\n{}"]
for dataset in sys.argv[1:]:
    task = make_reasoning_gym(dataset, {})
    problem = task.sample(1)
    words = str(problem.metadata["answer"]).split()[:5]
    answers = [form.format(MARK, MARK) for form in FORMS]
    answers += [" ".join([*words[:place], MARK, *words[place + 1:]]) for place in range(len(words))]
    for answer in answers:
        try:
            task.score(problem, answer)
        except Exception as error:
            print("\\n!", dataset, "fails on", repr(answer), repr(error))
    if ran:
        print("\\n!", dataset, "runs", ran[0])
        ran.clear()
"""


def audited(datasets: list[str]) -> list[str]:
    """Return the datasets that fail on the marked completions, or whose scorer runs a part of a completion as code.
    Python's audit hooks show what is run."""
    command = [sys.executable, "-c", AUDIT, *datasets]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    return [line for line in said.splitlines() if line.startswith("!")]  # Skips the dots that some datasets print.


def test_no_part_of_a_completion_is_run_by_the_scorers_that_evaluate_it() -> None:
    evaluating = ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"]
    assert audited([*evaluating, "knights_knaves", "sokoban"]) == []


@pytest.mark.slow
def test_no_part_of_a_completion_is_run_by_any_scorer() -> None:
    assert audited(sorted(DATASETS.keys() - REFUSED)) == []
