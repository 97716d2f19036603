"""Nodes check other nodes' rollouts: which nodes are asked, and what follows from their answers. Tested alone and in a
coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    CheckingCredited,
    CheckRecorded,
    CheckRollout,
    RolloutsDropped,
    ScoreRecorded,
    SendCheck,
    SendLease,
    StandingRecorded,
    TrustDecided,
)
from echo_hub.core.accounting.events import (
    CheckAbandoned,
    CheckReturned,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutScored,
    Tick,
)
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, UnfinishedRollout
from echo_hub.core.trust import checking
from echo_hub.core.trust.checking import Checking, CheckOutcome
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import alarm
from echo_hub.core.trust.numerics import Numerics, NumericsClass
from echo_hub.core.trust.pairs import PeerFinding
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import Decision, Standing, StandingRow, Standings, StandingState
from echo_shared.wire.messages import Checked, DropReason, ReceiptState
from tests.echo_hub.core.trust.simulated import HALF

TORCH = NumericsClass("torch", "f32", "cpu")
LLAMA = NumericsClass("llama_cpp", "f32", "cpu")
ALARM = alarm(1e-6)
DEADLINE_S = 10.0


def finding(below: float = 0.0, logprob: float = HALF, *, right: int = 0, tokens: int = 16) -> PeerFinding:
    """Return a checker's finding on tokens that node `d` sampled with the random number u = .25 and claimed as 50 %
    likely. The checker agrees on the first `right` tokens. For the others it finds that they have the log-probability
    `logprob`, and that the interval of cumulative probability that draws them begins at `below`.
    """
    below_T, logprobs_T = np.full(tokens, below), np.full(tokens, logprob)
    below_T[:right], logprobs_T[:right] = 0.0, HALF
    shown = Evidence.of(below_T, logprobs_T, np.full(tokens, 0.25), np.full(tokens, HALF))
    return PeerFinding(spans=(("d", shown),), below=below_T, logprobs=logprobs_T, num_tokens=tokens + 2)


HONEST = finding()
FORGED = finding(0.6, -9.0)
INVENTED = finding(0.9, -3.0)


class Nodes:
    """Nodes that may check, by name, each at its own address; node `d` sampled the rollouts."""

    def __init__(self, *names: str, state: StandingState = StandingState.PROVEN) -> None:
        self.standings = Standings(Numerics())
        self.out = Outbox()
        self.now = 100.0
        self.checking = Checking(
            secret=b"secret",
            deadline_s=DEADLINE_S,
            alarm=ALARM,
            doubt=ALARM / 2,
            standings=self.standings,
            out=self.out,
        )
        self.connect("d", "there")
        for number, name in enumerate(names):
            self.join(name, state=state, numerics=(TORCH, LLAMA)[number % 2])

    def standing(self, node_id: str) -> Standing:
        if self.standings.get(node_id) is None:
            self.standings.of(node_id).numerics = TORCH
        return self.standings.of(node_id)

    def connect(self, name: str, *kin: str) -> None:
        self.standing(name).kin = frozenset(filter(None, kin))
        self.checking.connected(name)

    def join(self, name: str, *, origin: str = "", room: int = 8, version: int = 5, **values: Any) -> None:
        for field, value in values.items():
            setattr(self.standing(name), field, value)
        self.connect(name, origin or f"at {name}")
        self.checking.reported(name, room, version)

    def asked(self) -> list[tuple[str, str]]:
        """Return (node, rollout) for each check that is requested in the next turn."""
        self.outcomes = self.checking.advance(self.now)
        return [(e.node_id, e.rollout_id) for e in self.out.take() if isinstance(e, SendCheck)]

    def want(self, rollout_id: str = "1-0", version: int = 3) -> str:
        """Request a check of the rollout, and return the node that is asked first."""
        self.checking.want(rollout_id, ("d",), version)
        ((node_id, _),) = self.asked()
        return node_id

    def answer(self, node_id: str, found: PeerFinding | None, rollout_id: str = "1-0") -> CheckOutcome | None:
        return self.checking.returned(node_id, rollout_id, found)


@pytest.fixture(autouse=True)
def lots(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Switch off audits, in which further nodes repeat a check that has a verdict; the returned function sets another
    share of checks to audit.
    """
    monkeypatch.setattr(checking, "AUDITED", 0.0)
    return lambda share: monkeypatch.setattr(checking, "AUDITED", share)


def test_nodes_that_refuse_the_tenant_do_not_check_its_rollouts() -> None:
    nodes = Nodes("a", "b", "c")
    for number in range(8):
        nodes.checking.want(f"{number}-0", ("d",), 3, unwilling=("a", "b"))
    assert {node_id for node_id, _ in nodes.asked()} == {"c"}
    nodes.checking.want("9-0", ("d",), 3, unwilling=("a", "b", "c"))
    assert nodes.asked() == []


# --- the choice of checkers


def test_the_sampler_and_its_address_are_never_asked() -> None:
    nodes = Nodes("a")
    nodes.join("d", origin="there", state=StandingState.PROVEN)
    nodes.join("twin", origin="there", state=StandingState.PROVEN)
    assert nodes.want() == "a"
    assert nodes.answer("a", FORGED) is None and nodes.asked() == [], "the second checker must have another address"
    nodes.join("b", origin="at a", state=StandingState.PROVEN)
    assert nodes.asked() == [], "nor may it share the first checker's address"
    nodes.join("c", state=StandingState.PROVEN)
    assert nodes.asked() == [("c", "1-0")]


def test_nodes_with_the_same_invite_are_never_asked() -> None:
    nodes = Nodes("a")
    nodes.join("friend", state=StandingState.PROVEN)
    nodes.connect("d", "there", "invite 1")
    nodes.connect("friend", "elsewhere", "invite 1")
    nodes.connect("a", "at a", "invite 2")
    assert nodes.want() == "a"
    assert nodes.answer("a", FORGED) is None and nodes.asked() == []


def test_nodes_of_the_hubs_own_host_share_nothing() -> None:
    nodes = Nodes()
    nodes.connect("d", "")
    nodes.connect("a", "")
    nodes.checking.reported("a", 8, 5)
    assert nodes.want() == "a"


def test_a_checker_needs_the_ability_the_version_and_capacity() -> None:
    nodes = Nodes()
    nodes.join("cannot", room=0, state=StandingState.PROVEN)
    nodes.join("behind", version=2, state=StandingState.PROVEN)
    nodes.join("small", room=1, state=StandingState.PROVEN)
    assert nodes.want("1-0") == "small"
    nodes.checking.want("2-0", ("d",), 3)
    assert nodes.asked() == []
    assert nodes.answer("small", HONEST) is not None
    assert nodes.asked() == [("small", "2-0")]


@pytest.mark.parametrize("state", [StandingState.SUSPECT, StandingState.QUARANTINED])
def test_untrusted_nodes_are_never_asked(state: StandingState) -> None:
    nodes = Nodes("a", state=state)
    nodes.checking.want("1-0", ("d",), 3)
    assert nodes.asked() == []


def test_new_nodes_are_asked_only_without_proven_ones() -> None:
    nodes = Nodes("n1", "n2", state=StandingState.NEW)
    nodes.join("p", room=1, state=StandingState.PROVEN)
    assert nodes.want("1-0") == "p"
    nodes.checking.want("2-0", ("d",), 3)
    assert nodes.asked() == [], "the proven node is full now, so the check waits for it"
    assert nodes.answer("p", FORGED) is None
    asked = dict(reversed(pair) for pair in nodes.asked())
    assert asked["2-0"] == "p" and asked["1-0"] in ("n1", "n2")


def test_checkers_of_another_class_are_preferred_at_random() -> None:
    nodes = Nodes("t1", "l1", "t2", "l2", "t3")
    first = {nodes.want(f"{number}-0") for number in range(8)}
    assert first == {"l1", "l2"}, "the sampling node is of the other class"
    assert nodes.answer("l1", FORGED, next(r for n, r in _asked_of(nodes, "l1"))) is None
    ((second, _),) = nodes.asked()
    assert second in ("t1", "t2", "t3"), "it must differ from the first checker before it differs from the sampler"


def _asked_of(nodes: Nodes, node_id: str) -> list[tuple[str, str]]:
    return [(node_id, rollout_id) for rollout_id in sorted(nodes.checking._checkers[node_id].asked_for)]


# --- outcomes of the answers


def test_one_acquittal_settles() -> None:
    nodes = Nodes("a", "b", "c")
    outcome = nodes.answer(nodes.want(), HONEST)
    assert outcome is not None and outcome.spans[0][:2] == HONEST.spans[0]
    assert [tokens for _, tokens in outcome.agreed] == [18] and not outcome.outvoted
    assert nodes.asked() == []


def test_an_accusation_needs_a_second_and_the_milder_of_the_two_counts() -> None:
    nodes = Nodes("a", "b", "c")
    first = nodes.want()
    assert nodes.answer(first, FORGED) is None
    ((second, _),) = nodes.asked()
    milder = finding(0.6, -9.0, right=1)
    outcome = nodes.answer(second, milder)
    assert outcome is not None and outcome.spans[0][1] == milder.spans[0][1]
    assert {node_id for node_id, _ in outcome.agreed} == {first, second} and not outcome.outvoted


def test_a_lying_checker_is_outvoted() -> None:
    """Checkers must compute the right values to acquit, but may invent values to accuse. So two honest checkers outvote
    a liar.
    """
    nodes = Nodes("a", "b", "c")
    liar = nodes.want()
    assert nodes.answer(liar, INVENTED) is None
    ((second, _),) = nodes.asked()
    assert nodes.answer(second, HONEST) is None
    ((third, _),) = nodes.asked()
    outcome = nodes.answer(third, HONEST)
    assert outcome is not None and outcome.outvoted == (liar,)
    assert [node_id for node_id, _ in outcome.agreed] == [second, third]
    assert outcome.spans[0][1] == HONEST.spans[0][1]
    assert (nodes.checking.num_opinions, nodes.checking.num_disagreements, nodes.checking.num_outvoted) == (3, 1, 1)


def test_a_colluding_acquittal_is_outvoted_if_audited(lots: Callable[[float], None]) -> None:
    """Acquittals count at once, so that no step waits. If the check is audited, two further checkers can disprove a
    false acquittal.
    """
    nodes = Nodes("a", "b", "c")
    lots(1.0)
    friend = nodes.want()
    outcome = nodes.answer(friend, HONEST)
    assert outcome is not None and outcome.spans and outcome.agreed == ((friend, 18),)
    ((second, _),) = nodes.asked()
    assert nodes.answer(second, FORGED) is None
    ((third, _),) = nodes.asked()
    outcome = nodes.answer(third, FORGED)
    assert outcome is not None and outcome.is_known and not outcome.spans
    assert (outcome.outvoted, outcome.disproved) == ((friend,), ("d",))
    assert outcome.agreed == ((second, 18), (third, 18)) and not nodes.checking._cases


def test_a_liar_that_disputes_a_settled_check_is_outvoted(lots: Callable[[float], None]) -> None:
    nodes = Nodes("a", "b", "c")
    lots(1.0)
    first = nodes.want()
    nodes.answer(first, HONEST)
    ((liar, _),) = nodes.asked()
    assert nodes.answer(liar, INVENTED) is None
    ((third, _),) = nodes.asked()
    outcome = nodes.answer(third, HONEST)
    assert outcome is not None and (outcome.outvoted, outcome.disproved) == ((liar,), ())
    assert outcome.agreed == ((third, 18),), "the first checker was credited before"


def test_two_agreeing_checkers_expose_a_liar(lots: Callable[[float], None]) -> None:
    """Two checkers found the rollout forged. The audit's third checker acquits with other values than theirs, so it
    lied.
    """
    nodes = Nodes("a", "b", "c")
    lots(1.0)
    assert nodes.answer(nodes.want(), FORGED) is None
    ((second, _),) = nodes.asked()
    outcome = nodes.answer(second, FORGED)
    assert outcome is not None and outcome.spans, "the check is settled"
    ((third, _),) = nodes.asked()
    assert nodes.answer(third, HONEST) == CheckOutcome(rollout_id="1-0", is_known=True, outvoted=(third,))
    assert nodes.asked() == [] and not nodes.checking._cases


def test_two_colluders_of_one_address_are_never_both_asked() -> None:
    nodes = Nodes()
    for name in ("x", "y"):
        nodes.join(name, origin="theirs", state=StandingState.PROVEN)
    accuser = nodes.want()
    assert nodes.answer(accuser, INVENTED) is None
    assert nodes.asked() == []
    nodes.now += DEADLINE_S
    assert nodes.asked() == []
    assert nodes.outcomes == [CheckOutcome(rollout_id="1-0", is_doubtful=True)]


def test_three_different_answers_settle_nothing() -> None:
    nodes = Nodes("a", "b", "c", "e")
    answers = [HONEST, INVENTED, finding(0.3, -7.0)]
    assert nodes.answer(nodes.want(), answers[1]) is None
    ((second, _),) = nodes.asked()
    assert nodes.answer(second, answers[0]) is None
    ((third, _),) = nodes.asked()
    assert nodes.answer(third, answers[2]) == CheckOutcome(rollout_id="1-0", is_doubtful=True)


Q4, Q8 = NumericsClass("llama_cpp", "q4_k_m", "cpu"), NumericsClass("llama_cpp", "q8_0", "cpu")


@pytest.mark.parametrize("numerics", [Q8, Q4])
def test_a_low_bit_colluder_is_outvoted_as_well(lots: Callable[[float], None], numerics: NumericsClass) -> None:
    """Low-bit checkers may deviate from others, but not so far that 64 forged tokens could pass as honest."""
    nodes = Nodes()
    lots(1.0)
    nodes.join("friend", state=StandingState.PROVEN, numerics=numerics)
    assert nodes.want() == "friend"
    outcome = nodes.answer("friend", finding(tokens=64))
    assert outcome is not None and outcome.spans
    for name in ("b", "c"):
        nodes.join(name, state=StandingState.PROVEN, numerics=(TORCH, LLAMA)[name == "c"])
    forged = finding(0.6, -9.0, tokens=64)
    ((second, _),) = nodes.asked()
    assert nodes.answer(second, forged) is None, "the checkers disagree"
    ((third, _),) = nodes.asked()
    outcome = nodes.answer(third, forged)
    assert outcome is not None and (outcome.outvoted, outcome.disproved) == (("friend",), ("d",))


@pytest.mark.parametrize("numerics", [Q8, Q4])
def test_a_low_bit_checker_accuses_a_node_that_forges_everything(numerics: NumericsClass) -> None:
    """Low-bit checkers allow for much rounding. This must not excuse 200 tokens whose random numbers all lie outside
    the intervals of cumulative probability that draw them.
    """
    nodes = Nodes()
    nodes.join("a", state=StandingState.PROVEN, numerics=numerics)
    rng, tokens = np.random.default_rng(1), 200
    below, logprobs = rng.random(tokens) * 0.5, np.full(tokens, HALF)
    shown = Evidence.of(below, logprobs, rng.random(tokens), logprobs)
    found = PeerFinding(spans=(("d", shown),), below=below, logprobs=logprobs, num_tokens=tokens + 2)
    assert nodes.answer(nodes.want(), found) is None, "a second checker is asked"


# --- lost checkers


def test_another_is_asked_when_a_checker_leaves_declines_or_takes_too_long() -> None:
    nodes = Nodes("a", "b", "c", "e")
    first = nodes.want()
    nodes.checking.disconnected(first)
    ((second, _),) = nodes.asked()
    assert nodes.answer(first, HONEST) is None, "the first checker is no longer asked"
    assert nodes.answer(second, None) is None
    ((third, _),) = nodes.asked()
    nodes.now += DEADLINE_S
    ((fourth, _),) = nodes.asked()
    assert len({first, second, third, fourth}) == 4
    assert nodes.answer(third, HONEST) is None, "too late"
    assert nodes.answer(fourth, HONEST) is not None


def test_answers_of_a_checker_that_became_suspect_are_ignored() -> None:
    nodes = Nodes("a", "b")
    first = nodes.want()
    nodes.standing(first).state = StandingState.SUSPECT
    nodes.checking.changed(first)
    assert nodes.answer(first, HONEST) is None and nodes.checking.num_opinions == 0
    ((second, _),) = nodes.asked()
    assert second != first


def test_a_settled_check_is_forgotten_without_a_second_checker(lots: Callable[[float], None]) -> None:
    nodes = Nodes("a")
    lots(1.0)
    outcome = nodes.answer(nodes.want(), HONEST)
    assert outcome is not None and outcome.spans and nodes.asked() == []
    nodes.now += DEADLINE_S
    assert nodes.asked() == [] and nodes.outcomes == [CheckOutcome(rollout_id="1-0", is_known=True)]
    assert not nodes.checking._cases


def test_a_check_without_checkers_is_abandoned() -> None:
    nodes = Nodes()
    nodes.checking.want("1-0", ("d",), 3)
    assert nodes.asked() == [] and nodes.checking.due_at == nodes.now + DEADLINE_S
    nodes.now = nodes.checking.due_at
    assert nodes.asked() == [] and nodes.outcomes == [CheckOutcome(rollout_id="1-0")]
    assert not nodes.checking._cases and not nodes.checking._waiting


def test_thousands_of_new_keys_are_not_asked_while_one_node_is_proven() -> None:
    """New keys cost nothing, so an attacker could have thousands."""
    for room in (0, 8):
        nodes = Nodes()
        for number in range(1_000):
            nodes.join(f"new {number}", room=room, state=StandingState.NEW)
        nodes.join("proven", room=100, state=StandingState.PROVEN)
        assert [nodes.want(f"{number}-0") for number in range(100)] == ["proven"] * 100


def test_a_node_is_asked_once_it_is_proven() -> None:
    nodes = Nodes("a", "b", "c", state=StandingState.NEW)
    nodes.standing("b").state = StandingState.PROVEN
    nodes.checking.changed("b")
    assert [nodes.want(f"{number}-0") for number in range(4)] == ["b"] * 4
    nodes.checking.disconnected("b")
    assert nodes.checking.num_checkers == 2 and "b" not in dict(nodes.asked())


def test_checks_due_at_once_are_spread_over_the_checkers() -> None:
    nodes = Nodes("a", "b")
    for name in "ab":
        nodes.join(name, room=1_000)
    for number in range(500):
        nodes.want(f"{number}-0")
    nodes.now += DEADLINE_S
    counts = [len(nodes.asked())]
    while nodes.checking.due_at <= nodes.now:
        counts.append(len(nodes.asked()))
    assert max(counts) <= checking.MOST_ASKED and sum(counts) == 500


# --- in a coordinator

SETTINGS = TrustSettings(enabled=True, by_nodes=True, secret=b"secret", first_checked=2, check_deadline_s=DEADLINE_S)


@pytest.fixture
def world(bench):
    """Return a function that makes a run with groups of one. Only node `d` gets work; nodes a, b and c check.
    `standings`: what the hub already knows of these nodes.
    """

    def make(*standings: StandingRow, snapshot: CoordinatorSnapshot | None = None):
        snapshot = snapshot or CoordinatorSnapshot(standings=standings)
        made = bench(snapshot, trust=SETTINGS, group_size=1)
        for number, name in enumerate("abc"):
            join(made, name, capacity=0, checks=8, numerics=(TORCH, LLAMA)[number % 2])
        return made

    return make


def join(bench, name: str, *, capacity: int = 100, checks: int = 0, numerics: NumericsClass = TORCH) -> list[SendLease]:
    bench.tell(
        NodeConnected(node_id=name, numerics=numerics, origin=f"at {name}"),
        NodeReported(node_id=name, capacity=capacity, policy_version=0, precision="f32", checks=checks),
    )
    return bench.of(SendLease)


def proven(name: str, numerics: NumericsClass = TORCH) -> StandingRow:
    return StandingRow(
        node_id=name, state=StandingState.PROVEN, numerics=numerics, num_verified=100, proof=-20.0, num_checked=100
    )


CHECKERS = (proven("a"), proven("b", LLAMA), proven("c"))


def arrive(bench, lease: SendLease) -> str:
    bench.tell(bench.arrival(lease, lease.indices[0]))
    assert not bench.of(CheckRollout)
    (asked,) = bench.of(SendCheck)
    return asked.node_id


def name_of(lease: SendLease) -> str:
    return f"{lease.lease_id}-{lease.indices[0]}"


def answer(bench, node_id: str, lease: SendLease, found: PeerFinding | None) -> str:
    """Send a checker's answer, and return the node that is asked next, "" if none is."""
    bench.tell(CheckReturned(node_id=node_id, rollout_id=name_of(lease), finding=found))
    return next((asked.node_id for asked in bench.of(SendCheck)), "")


def test_a_new_nodes_reward_waits_for_the_word_of_another(world) -> None:
    bench = world(*CHECKERS)
    lease = join(bench, "d")[0]
    checker = arrive(bench, lease)
    bench.tell(RolloutScored(rollout_id=name_of(lease), reward=1.0))
    assert not bench.of(ScoreRecorded)
    assert answer(bench, checker, lease, HONEST) == ""
    assert bench.of(ScoreRecorded) and bench.of(CheckRecorded)[0].checked is Checked.PASSED
    assert bench.of(CheckingCredited) == [CheckingCredited(node_id=checker, num_tokens=18)]
    assert bench.of(StandingRecorded)[-1].row.num_verified == 1
    status = bench.coordinator.status().trust
    assert (status.checkers, status.opinions, status.checked_tokens, status.waiting_checks) == (3, 1, 18, 0)


def test_two_unlike_nodes_convict_one(world) -> None:
    bench = world(*CHECKERS)
    lease = join(bench, "d")[0]
    first = arrive(bench, lease)
    second = answer(bench, first, lease, FORGED)
    assert not bench.of(TrustDecided), "one accusation is only a hint"
    answer(bench, second, lease, FORGED)
    assert [(one.node_id, one.decision) for one in bench.of(TrustDecided)] == [("d", Decision.QUARANTINED)]
    assert ({"a": TORCH, "b": LLAMA, "c": TORCH}[first]) != {"a": TORCH, "b": LLAMA, "c": TORCH}[second]
    assert bench.of(CheckRecorded)[0].checked is Checked.FAILED
    assert bench.of(RolloutsDropped)[0].reason is DropReason.FORGED


def test_a_lying_checker_must_prove_itself_again(world) -> None:
    bench = world(*CHECKERS)
    lease = join(bench, "d")[0]
    liar = arrive(bench, lease)
    second = answer(bench, liar, lease, INVENTED)
    third = answer(bench, second, lease, HONEST)
    answer(bench, third, lease, HONEST)
    rows = {record.row.node_id: record.row for record in bench.of(StandingRecorded)}
    assert rows[liar].state is StandingState.SUSPECT and rows["d"].num_verified == 1
    assert not bench.of(TrustDecided) and liar not in {one.node_id for one in bench.of(CheckingCredited)}


def test_a_disputed_rollout_is_not_trained_on(world) -> None:
    bench = world(*CHECKERS)
    lease = join(bench, "d")[0]
    first = arrive(bench, lease)
    bench.tell(RolloutScored(rollout_id=name_of(lease), reward=1.0))
    for other in {"a", "b", "c"} - {first}:
        bench.tell(NodeDisconnected(node_id=other))
    assert answer(bench, first, lease, FORGED) == ""
    assert bench.coordinator.due_at() <= 1_000.0 + DEADLINE_S
    bench.now += DEADLINE_S
    bench.tell(Tick())
    assert bench.of(RolloutsDropped)[0].rollout_ids == (name_of(lease),)
    assert not bench.of(ScoreRecorded) and not bench.of(TrustDecided)
    assert bench.coordinator.status().trust.abandoned_checks == 1


def test_a_rollout_without_checkers_is_used_unchecked(world) -> None:
    bench = world(*CHECKERS)
    lease = join(bench, "d")[0]
    arrive(bench, lease)
    bench.tell(RolloutScored(rollout_id=name_of(lease), reward=1.0))
    bench.tell(CheckAbandoned(rollout_id=name_of(lease)))
    assert bench.of(ScoreRecorded) and not bench.of(CheckRecorded)


def test_after_a_restart_unchecked_rollouts_are_checked_again(world) -> None:
    """Restarted hubs have forgotten their requests: they ask connected nodes again, and ignore answers to earlier
    requests.
    """
    row = UnfinishedRollout(
        rollout_id="1-0",
        lease_id=1,
        node_id="d",
        group_id=0,
        index=0,
        policy_version=0,
        deadline=1_060.0,
        state=ReceiptState.RECEIVED,
        reward=None,
    )
    snapshot = CoordinatorSnapshot(
        next_group_id=1,
        next_lease_id=2,
        groups=(GroupRow(group_id=0, seed=1),),
        rollouts=(row,),
        standings=CHECKERS,
    )
    bench = world(snapshot=snapshot)
    asked = [e for e in bench.effects if isinstance(e, SendCheck)]
    assert [one.rollout_id for one in asked] in ([], ["1-0"])
    bench.tell(*(CheckReturned(node_id=name, rollout_id="1-0", finding=HONEST) for name in "abc"))
    assert bench.of(CheckRecorded)[0].checked is Checked.PASSED and len(bench.of(CheckingCredited)) == 1


def test_in_the_first_minutes_new_nodes_prove_each_other(world) -> None:
    """Before any node is proven, two new nodes that agree can convict a third, and thereby prove each other."""
    bench = world()
    lease = join(bench, "d")[0]
    first = arrive(bench, lease)
    second = answer(bench, first, lease, FORGED)
    assert first != second and {first, second} <= set("abc")
    answer(bench, second, lease, FORGED)
    assert bench.of(TrustDecided)[0].node_id == "d"
