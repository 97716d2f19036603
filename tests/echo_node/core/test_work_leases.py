"""Which policy version a node's work loop samples each lease with, and for which reasons it returns a lease."""

import pytest

from echo_node.core.effects import (
    AddPolicy,
    CancelLease,
    DropPolicy,
    FetchArtefact,
    ForgetLease,
    SpoolRollout,
    SubmitGroup,
)
from echo_node.core.events import (
    Disconnected,
    DrainRequested,
    EngineLost,
    EngineReady,
    LeaseCancelled,
    LeaseFailed,
    NodeTick,
    PolicyPrepared,
    RolloutsDrawn,
)
from echo_node.core.tenant_choice import TenantChoice
from echo_node.core.work import LAST_WORDS_S
from echo_shared.errors import POLICY_UNUSABLE
from echo_shared.wire.messages import DropReason, LeaseReturned, LeaseRevoked, PolicyPublished, RolloutParts
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION
from tests.echo_node.core.loop_parts import (
    WIDTH,
    Node,
    continued,
    drawn,
    ended,
    finished,
    here,
    interruptible,
    lease,
    offer,
    shown,
    spans,
    welcome,
)
from tests.echo_node.core.test_policies import offer as real_offer


def test_a_leases_version_is_fetched_and_used_for_sampling() -> None:
    node = Node().ready()
    node(PolicyPublished(policy_version=1, offer=offer(1)))
    node(lease(7, version=1))
    assert node.of(SubmitGroup) == []
    node(here(1))
    kinds = [type(effect) for effect in node.turn]
    assert kinds.index(AddPolicy) < kinds.index(SubmitGroup)
    assert node.of(SubmitGroup)[0].request.policy_version == 1


def test_a_lease_may_bring_the_offer_of_its_version() -> None:
    node = Node().ready()
    node(PolicyPublished(policy_version=9, offer=offer(9)))
    node(lease(7, version=2).model_copy(update={"offer": offer(2)}))
    assert FetchArtefact(policy_version=2, offer=offer(2)) in node.turn and node.sent(LeaseReturned) == []
    assert node.loop.newest_published == 9
    node(here(2))
    assert node.of(SubmitGroup)[0].request.policy_version == 2


def test_a_lease_for_a_version_without_an_offer_is_returned() -> None:
    node = Node().ready()(lease(1, version=5))
    assert node.sent(LeaseReturned)[0].indices == (0, 1)
    assert ForgetLease(lease_id=1) in node.turn


def test_a_repeated_lease_is_held_once() -> None:
    node = Node().ready()(lease(1), lease(1))
    assert node.of(SubmitGroup) == []
    assert node.loop.held_rollouts == 2


def test_rollouts_in_the_spool_are_not_sampled_again() -> None:
    node = Node(unacked=["1-0"]).ready()(lease(1))
    assert node.of(SubmitGroup)[0].request.indices == (1,)


def test_a_group_that_fails_by_its_version_is_returned_with_the_version() -> None:
    node = Node().ready()(lease(1), lease(2))
    node(LeaseFailed(lease_id=1, what="not finite", code=POLICY_UNUSABLE), LeaseFailed(lease_id=2, what="no", code="x"))
    assert [(one.lease_id, one.unusable_version) for one in node.ever_sent(LeaseReturned)] == [
        (1, lease(1).policy_version),
        (2, None),
    ]


@pytest.mark.parametrize(("version", "rests"), [(0, True), (FIRST_TENANT_VERSION, False)])
def test_a_tenants_bad_adapters_never_make_an_engine_rest(version: int, rests: bool) -> None:
    node = Node().ready()
    for lease_id in range(1, 6):
        node(lease(lease_id, version=version))
        node(LeaseFailed(lease_id=lease_id, what="not finite", code=POLICY_UNUSABLE))
    assert len(node.ever_sent(LeaseReturned)) == 5
    assert (node.loop.status(node.now).capacity == 0) is rests


def test_a_restarted_nodes_leases_are_returned() -> None:
    node = Node(unfinished={4: (0, 3)})(welcome())
    (returned,) = node.sent(LeaseReturned)
    assert (returned.lease_id, returned.indices) == (4, (0, 3))


def test_an_overdue_lease_that_has_not_begun_is_returned() -> None:
    node = Node().ready()
    node(
        PolicyPublished(policy_version=1, offer=offer(1)),
        lease(1, version=1, deadline_s=10.0),
        lease(2, deadline_s=10.0),
    )
    node(NodeTick(), after_s=10.5)
    assert [r.lease_id for r in node.sent(LeaseReturned)] == [1]
    node(NodeTick(), after_s=10.0)
    assert node.of(CancelLease) == [CancelLease(lease_id=2)]
    assert node.sent(LeaseReturned) == [] and node(NodeTick()).of(CancelLease) == []
    assert [r.lease_id for r in node(LeaseCancelled(lease_id=2)).sent(LeaseReturned)] == [2]


def test_more_work_than_any_node_holds_is_returned() -> None:
    node = Node().ready()
    for n in range(1, 6):
        node(lease(n, count=1_000))
    assert [r.lease_id for r in node.ever_sent(LeaseReturned)] == [5]


def test_a_new_engine_continues_a_dead_ones_tokens() -> None:
    node = Node().ready()(continued(1, 1, 7), RolloutsDrawn(parts=(drawn(1, 0, 0, 5), drawn(1, 1, 1, 8))))
    node(EngineLost(what="killed"), EngineReady(width=WIDTH))
    prefixes = {one.index: one.ids.tolist() for one in node.of(SubmitGroup)[0].request.prefixes}
    assert prefixes == {0: [5], 1: [7, 8]}
    node(RolloutsDrawn(parts=(drawn(1, 0, 1, 6),)))
    assert shown(node.sent(RolloutParts)) == [(1, 0, 1, [6])]
    assert node(finished(1, 1)).of(SpoolRollout)[0].rollout.num_given == 1, "the tokens that the hub gave"


def test_an_engine_that_does_not_answer_or_ends_holds_no_lease_back() -> None:
    node = Node().ready()(lease(1), DrainRequested(reason="enough"))
    assert node(NodeTick(), after_s=LAST_WORDS_S).sent(LeaseReturned)[0].lease_id == 1
    node = Node().ready()(lease(1), DrainRequested(reason="enough"), EngineLost(what="killed"))
    assert [one.reason for one in node.sent(LeaseReturned)] == ["enough"]
    assert node.of(CancelLease) == [] and node(LeaseCancelled(lease_id=1)).sent(LeaseReturned) == []


def prepared_anew(node: Node, version: int) -> Node:
    """Publish a newer version; the node fetches it and prepares it in the engine."""
    news = PolicyPublished(policy_version=version, offer=offer(version))
    return node(news, here(version), PolicyPrepared(policy_version=version))


def test_a_completion_continues_with_a_newer_version() -> None:
    node = Node().ready()(interruptible(1), RolloutsDrawn(parts=(drawn(1, 0, 0, 0, 1), drawn(1, 1, 0, 0))))
    prepared_anew(node, 1)
    assert node.of(CancelLease) == [CancelLease(lease_id=1)] and node.of(SubmitGroup) == []
    node(RolloutsDrawn(parts=(drawn(1, 0, 2, 2),)), NodeTick())
    assert node.of(CancelLease) == [], "once"
    node(LeaseCancelled(lease_id=1))
    (submitted,) = node.of(SubmitGroup)
    assert submitted.request.policy_version == 1
    assert {one.index: one.ids.tolist() for one in submitted.request.prefixes} == {0: [0, 1, 2], 1: [0]}
    node(RolloutsDrawn(parts=(drawn(1, 0, 3, 3, version=1),)))
    assert [(part.start, part.policy_version) for part in node.sent(RolloutParts)[0].parts] == [(3, 1)]
    (spool,) = node(ended(1, 0, 1, tokens=6)).of(SpoolRollout)
    rollout = spool.rollout
    assert (rollout.policy_version_start, rollout.policy_version_end, rollout.num_given) == (0, 1, 0)
    assert spans(rollout) == [(0, 3), (1, 3)]
    assert DropPolicy(policy_version=0) not in node.wanted or node.loop.held_rollouts == 1


def test_rollouts_that_end_soon_are_not_interrupted() -> None:
    node = Node().ready()(lease(1, count=1), interruptible(2, max_tokens=8), finished(1, 0))
    prepared_anew(node, 1)
    assert node.of(CancelLease) == [], "8 tokens at 50 a second"
    node = Node().ready()(interruptible(2), PolicyPublished(policy_version=1, offer=offer(1)), here(1))
    assert node.of(CancelLease) == [], "the engine does not have it yet"
    assert node(PolicyPrepared(policy_version=1)).of(CancelLease) == [CancelLease(lease_id=2)]


def test_an_engine_that_dies_between_versions_loses_only_unreported_tokens() -> None:
    node = Node().ready()(interruptible(1, count=1), RolloutsDrawn(parts=(drawn(1, 0, 0, 0, 1),)))
    prepared_anew(node, 1)
    node(EngineLost(what="killed"), EngineReady(width=WIDTH))
    (submitted,) = node.of(SubmitGroup)
    assert (submitted.request.policy_version, [len(one.ids) for one in submitted.request.prefixes]) == (1, [2])
    (spool,) = node(ended(1, 0, 1, tokens=3)).of(SpoolRollout)
    assert spans(spool.rollout) == [(0, 2), (1, 1)]


def test_a_lease_that_is_revoked_or_goes_back_between_two_versions_ends_once() -> None:
    node = prepared_anew(Node().ready()(interruptible(1), interruptible(2), interruptible(3)), 1)
    node(LeaseRevoked(lease_id=1, reason=DropReason.STALE), LeaseFailed(lease_id=2, what="no"))
    node(DrainRequested(reason="enough"), LeaseCancelled(lease_id=1), LeaseCancelled(lease_id=2))
    node(LeaseCancelled(lease_id=3))
    assert [one.lease_id for one in node.ever_sent(LeaseReturned)] == [2, 3]
    assert sum(isinstance(effect, SubmitGroup) for effect in node.wanted) == 3


def test_a_replaced_versions_tokens_are_dropped_with_it() -> None:
    """A hub restored from a backup publishes another policy with an old version's number. Tokens of the old policy must
    not be continued.
    """
    node = Node()(welcome(1).model_copy(update={"policy": real_offer(1)}), here(None), here(1))
    node(EngineReady(width=WIDTH), lease(1, version=1), lease(2, version=0))
    node(RolloutsDrawn(parts=(drawn(1, 0, 0, 7, version=1), drawn(2, 0, 0, 8))), Disconnected())
    node(welcome(1).model_copy(update={"policy": real_offer(1, "b")}))
    assert [(one.lease_id, one.reason) for one in node.sent(LeaseReturned)] == [
        (1, "policy version 1 has been replaced")
    ]
    assert shown(node.sent(RolloutParts)) == [(2, 0, 0, [8])]
    engine = [effect for effect in node.turn if isinstance(effect, CancelLease | DropPolicy)]
    assert engine == [CancelLease(lease_id=1), DropPolicy(policy_version=1)], "no group of the dropped version is left"
    node(here(1), lease(3, version=1))
    assert [one.request.lease_id for one in node.of(SubmitGroup)] == [3]


def test_the_work_of_refused_tenants_goes_back_and_the_rest_is_named() -> None:
    node = Node().ready()
    node.loop.willing = TenantChoice(refuses=("Ada",))
    node(lease(1).model_copy(update={"tenant": "Ada"}))
    (returned,) = node.sent(LeaseReturned)
    assert returned.lease_id == 1 and "does not work for this tenant" in returned.reason
    node(lease(2).model_copy(update={"tenant": "Bob"}), lease(3))
    assert node.loop.held_rollouts == 4 and node.loop.progress.tenants == ("Bob",)
    node.loop.willing = TenantChoice(answers=False)
    node(lease(4).model_copy(update={"tenant": "Bob"}))
    assert len(node.sent(LeaseReturned)) == 1 and node.loop.held_rollouts == 4
