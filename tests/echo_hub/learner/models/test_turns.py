from __future__ import annotations

from collections import Counter

from echo_hub.learner.models.turns import FairTurns


def test_keys_with_enough_work_get_equal_time_however_long_their_turns_are() -> None:
    turns, spent = FairTurns[str](), Counter[str]()
    for _ in range(2_000):
        key = turns.next(["long", "short"])
        seconds = 8.0 if key == "long" else 0.5
        turns.spent(key, seconds)
        spent[key] += int(seconds * 2)
    assert abs(spent["long"] - spent["short"]) <= 16


def test_idle_time_is_not_saved_up() -> None:
    turns = FairTurns[str]()
    for _ in range(100):
        turns.spent(turns.next(["busy"]), 1.0)
    taken = []
    for _ in range(10):
        taken.append(turns.next(["busy", "new"]))
        turns.spent(taken[-1], 1.0)
    assert sorted(taken) == ["busy"] * 5 + ["new"] * 5


def test_a_key_that_pauses_between_its_turns_keeps_what_it_used() -> None:
    turns, spent = FairTurns[str](), Counter[str]()
    pauses = False
    for _ in range(1_000):
        key = turns.next(["steady"] if pauses else ["steady", "pausing"])
        seconds = 10 if key == "pausing" else 1
        turns.spent(key, seconds)
        spent[key] += seconds
        pauses = key == "pausing"
    assert spent["pausing"] <= spent["steady"] + 10


def test_a_forgotten_key_starts_with_the_others() -> None:
    turns = FairTurns[str]()
    turns.spent(turns.next(["a"]), 100.0)
    turns.forget("a")
    assert turns.next(["b", "a"]) == "b"
