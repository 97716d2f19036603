"""Policies (adapters) are prepared, set and freed in the right order; a stub of an engine records the calls."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from echo_node.backends.policies import EnginePolicies
from echo_shared.errors import BackendError, CodecError


class Policy:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self._done = done

    def free(self) -> None:
        self._done.append(f"free {self.name}")


class SlowEngine:
    """A stub of an engine. The name of an adapter's directory tells what happens: `prepare` refuses `damaged`, and
    waits for `go` before it prepares `slow`; `set_policy` refuses `bad`.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = threading.Event()

    def prepare(self, adapter_dir: Path) -> Policy:
        if adapter_dir.name == "damaged":
            raise CodecError("It is damaged.")
        if adapter_dir.name == "slow":
            self.go.wait()
        self.done.append(f"prepare {adapter_dir.name}")
        return Policy(adapter_dir.name, self.done)

    def set_policy(self, policy: Policy | None) -> None:
        if policy is not None and policy.name == "bad":
            raise BackendError("It does not fit.")
        self.done.append(f"set {policy and policy.name}")


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
def policies(engine: SlowEngine) -> EnginePolicies:
    return EnginePolicies(engine)  # type: ignore[arg-type]  # The stub has all that the policies use of an engine.


def test_the_base_is_known_from_the_start(engine: SlowEngine, policies: EnginePolicies) -> None:
    assert policies.is_ready(0)
    policies.use(0)
    policies.use(0)
    assert engine.done == ["set None"]


def test_an_unknown_version_cannot_be_used(policies: EnginePolicies) -> None:
    assert policies.is_ready(1)  # An unknown version counts as ready: its use does not wait, but fails at once.
    with pytest.raises(BackendError) as caught:
        policies.use(1)
    assert caught.value.code == "unknown_policy"


def test_a_version_is_ready_once_it_is_prepared(engine: SlowEngine, policies: EnginePolicies) -> None:
    policies.add(1, Path("slow"))
    assert not policies.is_ready(1)
    policies.wait([1], timeout_s=0.0)
    engine.go.set()
    policies.wait([1], timeout_s=60.0)
    assert policies.is_ready(1)
    policies.use(1)
    assert engine.done == ["prepare slow", "set slow"]
    policies.close()


def test_a_policy_that_fails_to_prepare_fails_each_time(policies: EnginePolicies) -> None:
    policies.add(1, Path("damaged"))
    for _ in range(2):
        with pytest.raises(CodecError):
            policies.use(1)
    policies.drop(1)
    policies.close()


def test_a_dropped_policy_in_use_is_freed_once_replaced(engine: SlowEngine, policies: EnginePolicies) -> None:
    for version, name in ((1, "a"), (2, "b")):
        policies.add(version, Path(name))
    policies.use(1)
    policies.drop(1)
    policies.use(2)
    policies.drop(2)
    policies.use_base()
    assert engine.done[-4:] == ["set b", "free a", "set None", "free b"]


def test_a_policy_dropped_during_preparation_is_freed_later(engine: SlowEngine, policies: EnginePolicies) -> None:
    policies.add(1, Path("slow"))
    policies.add(2, Path("never begun"))
    policies.drop(2)
    policies.drop(1)
    policies.use(0)
    engine.go.set()
    policies.close()
    policies.drop(3)
    assert engine.done == ["set None", "prepare slow", "free slow"]


def test_nothing_is_freed_while_the_engine_is_half_set(engine: SlowEngine, policies: EnginePolicies) -> None:
    for version, name in ((1, "a"), (2, "bad")):
        policies.add(version, Path(name))
    policies.use(1)
    with pytest.raises(BackendError):
        policies.use(2)
    for version in (1, 2):
        policies.drop(version)
    assert not any(word.startswith("free") for word in engine.done)
    policies.use(0)
    assert engine.done[-3:] == ["set None", "free a", "free bad"]
