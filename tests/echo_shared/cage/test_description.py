from echo_shared.cage.description import Held
from echo_shared.cage.guards import GUARDS


def test_a_whole_cage_in_a_sentence() -> None:
    held = Held(by=("Landlock 7", "seccomp"))
    assert held.holds == tuple(GUARDS)
    assert held.sentence == "reading, writing, network, programs, processes (by Landlock 7 and seccomp)"


def test_a_partial_cage_gives_the_reason() -> None:
    held = Held(by=("a job object",), lacks={"reading": "no way", "network": "no way either"})
    assert held.holds == ("writing", "programs", "processes")
    kept = "writing, programs, processes (by a job object)"
    assert held.sentence == f"{kept}; not reading: no way; not network: no way either"


def test_a_missing_cage_gives_the_reason() -> None:
    assert Held.to_nothing("the settings turn it off").sentence == "none: the settings turn it off"
    assert Held.to_nothing("x").holds == ()


def test_a_description_survives_json() -> None:
    held = Held(by=("seccomp",), lacks={"reading": "no Landlock"})
    assert Held.of(held.as_json()) == held


def test_guards_missing_for_one_reason_are_listed_together() -> None:
    held = Held(by=("seccomp",), lacks={"reading": "no Landlock", "writing": "no Landlock", "network": "a socket"})
    assert held.sentence == "programs, processes (by seccomp); not reading, writing: no Landlock; not network: a socket"
