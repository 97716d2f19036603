"""The cost of a query must be as low on a run's last day as on its first."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.event import listen, remove

import echo_hub
from echo_hub.actions.records import Actor
from echo_hub.actions.requests import (
    Ban,
    BlockTenant,
    MakeInvite,
    MakeToken,
    Pardon,
    Pause,
    RevokeInvite,
    RevokeToken,
    SetTenantQuota,
    Unban,
    UnblockTenant,
)
from echo_hub.core.accounting.effects import (
    RECORDS,
    ActionSettled,
    AnswerOpened,
    AnswerReplaced,
    AnswersCancelled,
    CheckingCredited,
    CheckRecorded,
    CoarseClassesRecorded,
    CostAccrued,
    GroupDropped,
    GroupsRated,
    NodeCost,
    Record,
    RolloutsAnswered,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    SessionNoted,
    SettingRecorded,
    StandingRecorded,
    TrustDecided,
)
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.trust.numerics import CoarseClass, NumericsClass
from echo_hub.core.trust.standing import Decision, StandingRow
from echo_hub.spread.holdings import Arrival, Release
from echo_hub.store import browsing, old_fetches, training
from echo_hub.store.actions import (
    begin_settings,
    find_action,
    note_action,
    read_action_log,
    read_api_tokens,
    read_num_api_tokens,
    read_settings,
    read_wanted_actions,
    settle_action,
    was_undone,
)
from echo_hub.store.answers import (
    read_answer_groups,
    read_answered,
    read_next_answer_id,
    read_open_answers,
    settle_answers,
)
from echo_hub.store.board import read_board, read_credited_node, read_public_receipt, read_shares
from echo_hub.store.browsing import (
    NEWEST,
    find_rollouts,
    read_batch_rewards,
    read_group,
    read_tokens,
    summaries_of_groups,
)
from echo_hub.store.credits import read_credits
from echo_hub.store.database import connect, read_meta, write_meta
from echo_hub.store.drawing import read_draws
from echo_hub.store.elsewhere import read_known_hubs, read_run_credit, take_in
from echo_hub.store.events import read_events
from echo_hub.store.invites import add_invite, read_came_by, read_invites, read_num_invites, revoke_invite
from echo_hub.store.keeping import read_kept_totals
from echo_hub.store.known_nodes import ban_nodes, note_still_here, read_banned_nodes, read_counted_names, unban_nodes
from echo_hub.store.node_records import read_contribution, read_node_record
from echo_hub.store.owners import read_counts_once, read_is_owned, read_owned, read_owned_ids, set_counts_once
from echo_hub.store.reading import read_batch, read_evaluated, read_groups, read_payloads, read_receipts, read_turns
from echo_hub.store.recent import read_node_kinds, read_recent_rollouts, read_spreads
from echo_hub.store.recent_work import read_batch_ages, read_lengths
from echo_hub.store.reports import (
    read_accounting,
    read_costs,
    read_evaluated_versions,
    read_evaluations,
    read_leaderboard,
    read_newest_step,
    read_num_nodes,
    read_steps,
    read_under_way,
    read_versions_by_transport,
)
from echo_hub.store.retired import RetiredMark, StepSpan, read_last, read_last_answer
from echo_hub.store.retiring import (
    read_final_keys,
    read_first_mark,
    read_groups_of_steps,
    read_old_answers,
    read_ripe,
    read_trained_at,
    retire,
    retire_answers,
)
from echo_hub.store.run_facts import read_facts
from echo_hub.store.sessions import read_session_losses
from echo_hub.store.standings import read_wanted_pardons, want_pardon
from echo_hub.store.store import Store
from echo_hub.store.tables import metadata
from echo_hub.store.tallies import read_useful_nodes
from echo_hub.store.teams import change_team, read_own_team, read_team, remove_team
from echo_hub.store.unfinished import read_snapshot
from echo_hub.store.whole_run import (
    read_batch_ids,
    read_engines,
    read_evaluation_groups_after,
    read_groups_after,
    read_leases_of_groups,
    read_step_facts,
)
from echo_shared.records.credit import BoardQuery
from echo_shared.records.rollout import RolloutFilter
from echo_shared.records.run import Evaluation, EvaluationKind, EventFilter, Invite, RunEvent
from echo_shared.records.run_credit import NodeCredit, RunCredit
from echo_shared.wire.messages import Checked, DropReason, Fetched, TeamWanted, Way
from tests.echo_hub.store.tenant_calls import fill_tenants, tenant_calls

ADA: Final = Invite(name="Ada", token_hash="a", max_keys=1, created_at=1.0, expires_at=2.0)
FEW, MANY = 20, 320
"""Number of steps in a short and in a long run, each of one group of two."""
HUB: Final = Path(echo_hub.__file__).parent

AT_OPENING: Final = {"read_evaluated_versions", "read_came_by", "read_live_tenants", "read_checkpoint_directories"}
"""Queries made only at the hub's start, so their cost may grow with the run."""

WHOLE: Final = {
    ("read_leaderboard", "nodes"): "a row a node: it shows every node",
    ("read_leaderboard", "tallies"): "a row a node and outcome: it shows every node",
    ("read_leaderboard", "costs"): "a row a node: it shows every node",
    ("read_leaderboard", "checking"): "a row a node: it shows every node",
    ("read_leaderboard", "trust"): "a row a node: it shows every node",
    ("read_leaderboard", "invites"): "a row a person who was invited: it shows whose invite each node came by",
    ("read_num_nodes", "nodes"): "a row a node: their number",
    ("read_num_nodes", "tallies"): "a row a node and outcome: the nodes' number",
    ("read_num_nodes", None): "PostgreSQL counts by an index, and names no table for that",
    ("read_credits", "nodes"): "a row a node: it ranks every node that was of use",
    ("read_credits", "tallies"): "a row a node and outcome: it ranks every node that was of use",
    ("read_costs", "costs"): "a row a node that ever cost something: their sum",
    ("read_accounting", "outcome_tallies"): "a row an outcome",
    ("apply", "outcome_tallies"): "a row an outcome",
    ("count_all", "outcome_tallies"): "a row an outcome",
    ("read_leaderboard", "outcome_tallies"): "a row an outcome",
    ("read_node_record", "outcome_tallies"): "a row an outcome",
    ("apply", "uncounted"): "a row a part of a step that is not counted yet: some, for moments",
    ("prune", "uncounted"): "a row a part of a step that is not counted yet",
    ("count_trained", "uncounted"): "a row a part of a step that is not counted yet",
    ("count_all", "uncounted"): "a row a part of a step that is not counted yet",
    ("read_versions_by_transport", "fetch_tallies"): "a row a transport",
    ("read_useful_nodes", "tallies"): "a row a node and outcome: it names every node that was of use",
    ("read_counted_names", "nodes"): "a row a node: it names every node that was of use",
    ("read_counted_names", "tallies"): "a row a node and outcome: it names every node that was of use",
    ("read_meta", "run_meta"): "a row a setting",
    ("read_snapshot", "trust"): "a row a node that was ever checked",
    ("read_snapshot", "answers"): "a row a group of tenants' samples that is not settled",
    ("read_open_answers", "answers"): "a row a group of tenants' samples that is not settled",
    ("settle_answers", "keeping_tallies"): "four rows: kept, and why not",
    ("read_kept_totals", "keeping_tallies"): "four rows: kept, and why not",
    ("apply", "keeping_tallies"): "four rows: kept, and why not",
    ("prune", "keeping_tallies"): "four rows: kept, and why not",
    ("record_evaluations", "keeping_tallies"): "four rows: kept, and why not",
    ("add_invite", "invites"): "a row a person who was invited",
    ("read_invites", "invites"): "a row a person who was invited",
    ("read_num_invites", "invites"): "a row a person who was invited: their number",
    ("revoke_invite", "invites"): "a row a person who was invited",
    ("revoke_invite", "nodes"): "a row a node: an operator's command, now and then",
    ("read_board", "owners"): "one row: whether an owner has one entry for all nodes",
    ("read_credited_node", "owners"): "one row: whether an owner has one entry for all nodes",
    ("read_credits", "owners"): "one row: whether an owner has one entry for all nodes",
    ("read_board", "teams"): "a row a team: it ranks every team",
    ("read_board", None): "PostgreSQL counts teams by an index",
    ("read_board", "runs_elsewhere"): "a row a run of other hubs: whether there is one",
    ("read_team", "teams"): "a row a team: it ranks every team",
    ("read_own_team", "teams"): "a row a team: it ranks every team",
    ("read_own_team", None): "PostgreSQL counts teams by an index",
    ("change_team", "teams"): "a row a team: their number",
    ("change_team", None): "PostgreSQL counts teams by an index",
    ("read_known_hubs", "runs_elsewhere"): "a row a run of other hubs: a command, now and then",
    ("note_action", "invites"): "a row a person who was invited",
    ("note_action", "nodes"): "a row a node: an operator's action, now and then",
    ("note_action", "api_tokens"): "a row a token of an operator's",
    ("read_api_tokens", "api_tokens"): "a row a token of an operator's",
    ("read_num_api_tokens", "api_tokens"): "a row a token of an operator's: their number",
    ("read_tenants", "api_tokens"): "a row a token of an operator's",
    ("read_tenants", "tenant_limits"): "a row a tenant about which an operator has decided",
    ("read_tenant_limits", "tenant_limits"): "a row a tenant about which an operator has decided",
    ("note_action", "tenant_limits"): "a row a tenant about which an operator has decided",
    ("read_settings", "live_settings"): "a row a setting",
    ("begin_settings", "live_settings"): "a row a setting",
}
"""Tables that a query may read whole, with the reason: they do not grow with rollouts, leases, fetches or steps. Keys
are (query, table).
"""

WHOLE_RUN: Final = {"read_shares": "a node's page shows the steps of the whole run"}
"""Queries whose result and cost grow with the run, with the reason for each query."""

PARTIAL: Final = {index.name for table in metadata.tables.values() for index in table.indexes if index.dialect_kwargs}
"""Partial indexes: each contains only few of its table's rows."""


ANSWERS: Final = FIRST_ANSWER_ID


def _answers(group_id: int) -> AnswerGroup:
    return AnswerGroup(
        group_id=group_id,
        tenant_id="t",
        prompt_ids=np.array([1], np.int32),
        policy_version=0,
        seed=1,
        sampling=SamplingParameters(temperature=1.0, max_tokens=4),
        is_checked=False,
        members=(AnswerMember(request_id="r", num_samples=1),),
    )


@dataclass(frozen=True)
class Filled:
    """A database with a run of `steps` steps. `calls` makes the store's next calls in this run, as the hub would make
    them.
    """

    url: str
    steps: int
    records: Any

    def fill(self) -> None:
        store = Store.open(self.url, events_kept=FEW)
        for node_id in "abc":
            self._join(store, node_id)
        done = range(1, self.steps + 1)
        store.apply([r for step in done for r in self.records.one_step(step, lease_id=step, group_id=step - 1)], 1.0)
        store.record_distribution([self._arrival(node_id, step) for step in done for node_id in "abc"], 1.0)
        for version in done[::10]:
            self._evaluate(store, version)
        store.apply([], 1.0, events=[_event() for _ in done])
        for _ in done:
            store.write(note_action, Pause(), Actor(via="cli", who="ada"), now=1.0)
        for action in store.read(read_wanted_actions):
            store.write(settle_action, ActionSettled(number=action.number, done=True), now=1.0)
        store.prune(self.steps - 2)
        fill_tenants(store, self.steps)
        store.close()

    def calls(self, store: Store) -> Mapping[str, Callable[[], object]]:
        """Return a call for each query and public method of the store, as the hub makes it during a run."""
        newest = self.steps
        ids = [f"{newest}-0", f"{newest}-1"]
        return {
            "apply": lambda: self._one_of_each_record(store),
            "count_trained": store.count_trained,
            "count_all": lambda: self._count_large_step(store),
            "read_snapshot": lambda: store.read(read_snapshot),
            "read_receipts": lambda: store.read(read_receipts, "a", ids),
            "read_payloads": lambda: store.read(read_payloads, ids),
            "read_turns": lambda: store.read(read_turns, {(newest - 1, 0), (newest - 1, 1)}),
            "read_draws": lambda: store.read(read_draws, ids),
            "read_open_answers": lambda: store.read(read_open_answers),
            "read_answer_groups": lambda: store.read(read_answer_groups, [ANSWERS]),
            "read_answered": lambda: store.read(read_answered, [ANSWERS]),
            "read_next_answer_id": lambda: store.read(read_next_answer_id),
            "settle_answers": lambda: store.write(settle_answers, [ANSWERS]),
            "read_batch": lambda: store.read(read_batch, newest),
            "read_groups": lambda: store.read(read_groups, {newest: ids}),
            "read_session_losses": lambda: store.read(read_session_losses, [newest]),
            "read_evaluated": lambda: store.read(read_evaluated, newest),
            "prune": lambda: store.prune(newest - 1),
            "node_seen": lambda: self._join(store, "a"),
            "note_still_here": lambda: store.write(note_still_here, ["a", "b"], now=2.0),
            "ban_nodes": lambda: store.write(ban_nodes, ["a"], now=2.0),
            "unban_nodes": lambda: store.write(unban_nodes, ["a"]),
            "read_banned_nodes": lambda: store.read(read_banned_nodes),
            "want_pardon": lambda: store.write(want_pardon, ["a"], now=2.0),
            "read_wanted_pardons": lambda: store.read(read_wanted_pardons),
            "read_useful_nodes": lambda: store.read(read_useful_nodes),
            "add_invite": lambda: store.write(add_invite, ADA),
            "read_invites": lambda: store.read(read_invites),
            "read_num_invites": lambda: store.read(read_num_invites),
            "read_came_by": lambda: store.read(read_came_by),
            "revoke_invite": lambda: store.write(revoke_invite, "Ada", now=2.0, ban=True),
            "record_distribution": lambda: store.record_distribution(
                [self._release(newest), self._arrival("d", newest)], now=1.0
            ),
            "record_evaluations": lambda: self._evaluate(store, newest + 10),
            "write_meta": lambda: store.write(write_meta, "run_id", "r"),
            "read_meta": lambda: store.read(read_meta),
            "read_leaderboard": lambda: store.read(read_leaderboard),
            "read_contribution": lambda: store.read(
                read_contribution, "a", run_id="r", run_name="R", hub_key=bytes(32), now=2.0
            ),
            "read_credits": lambda: store.read(read_credits, ["a", "b"]),
            "read_counted_names": lambda: store.read(read_counted_names),
            "read_num_nodes": lambda: store.read(read_num_nodes),
            "read_under_way": lambda: store.read(read_under_way),
            "read_accounting": lambda: store.read(read_accounting),
            "read_costs": lambda: store.read(read_costs),
            "read_steps": lambda: store.read(read_steps, newest - 3),
            "read_newest_step": lambda: store.read(read_newest_step),
            "versions_history": lambda: store.versions_history(5),
            "read_versions_by_transport": lambda: store.read(read_versions_by_transport),
            "read_recent_rollouts": lambda: store.read(read_recent_rollouts, 6),
            "read_lengths": lambda: store.read(read_lengths, 6),
            "read_batch_ages": lambda: store.read(read_batch_ages, 3),
            "read_spreads": lambda: store.read(read_spreads, 3),
            "read_node_kinds": lambda: store.read(read_node_kinds, ["a", "b"]),
            "read_evaluations": lambda: store.read(read_evaluations, 1e9),
            "read_evaluated_versions": lambda: store.read(read_evaluated_versions),
            "find_rollouts": lambda: self._find_all_ways(store),
            "read_tokens": lambda: store.read(read_tokens, [(newest, 0), (1, 0)]),
            "read_group": lambda: store.read(read_group, newest - 1),
            "read_batch_rewards": lambda: store.read(read_batch_rewards, newest),
            "read_kept_totals": lambda: store.read(read_kept_totals),
            "read_events": lambda: self._find_events(store),
            "read_node_record": lambda: store.read(read_node_record, "a"),
            **self._credit_calls(store),
            **self._action_calls(store),
            **self._retirement_calls(store),
            **tenant_calls(store, self.steps),
        }

    def _retirement_calls(self, store: Store) -> Mapping[str, Callable[[], object]]:
        """Return calls that retire a step older than the newest one whose tokens were pruned."""
        step = self.steps - 6
        span = StepSpan(
            after=RetiredMark(step=step - 1, group=step - 2), through=RetiredMark(step=step, group=step - 1)
        )
        return {
            "read_first_mark": lambda: store.read(read_first_mark),
            "read_last": lambda: store.read(read_last),
            "read_ripe": lambda: store.read(read_ripe, span.after, step + 3),
            "read_final_keys": lambda: store.read(read_final_keys, span),
            "read_groups_of_steps": lambda: store.read(read_groups_of_steps, span),
            "summaries_of_groups": lambda: store.read(summaries_of_groups, [step - 1]),
            "read_trained_at": lambda: store.read(read_trained_at, step),
            "retire": lambda: retire(store, [(step, 0), (step, 1)], span),
            "read_old_answers": lambda: store.read(read_old_answers, 1e12),
            "retire_answers": lambda: store.write(retire_answers, store.read(read_old_answers, 1e12)),
            "read_last_answer": lambda: store.read(read_last_answer),
            "read_groups_after": lambda: store.read(read_groups_after, step, 3),
            "read_evaluation_groups_after": lambda: store.read(read_evaluation_groups_after, -1, 2),
            "read_leases_of_groups": lambda: store.read(read_leases_of_groups, [step - 1]),
            "read_batch_ids": lambda: store.read(read_batch_ids, step),
            "read_step_facts": lambda: store.read(read_step_facts, step, 2),
            "read_engines": lambda: store.read(read_engines, ["a", "b"]),
        }

    def _credit_calls(self, store: Store) -> Mapping[str, Callable[[], object]]:
        run = {"run_id": "r", "run_name": "R", "hub_key": bytes(32)}
        elsewhere = RunCredit(
            run_id="s",
            run_name="S",
            hub_key=bytes(32).hex(),
            issued_at="2026-01-01T00:00:00Z",
            nodes=(NodeCredit(node_id="a", node_name="a", rollouts=1, tokens=2),),
        )
        return {
            "change_team": lambda: [
                store.write(change_team, "a", TeamWanted(action=action, name="A team"), now=2.0)
                for action in ("create", "leave", "create", "join", "show")
            ],
            "read_board": lambda: [
                store.read(read_board, wanted, now=2.0)
                for wanted in (BoardQuery(), BoardQuery(kind="team"), BoardQuery(search="a", team="A team"))
            ],
            "read_credited_node": lambda: store.read(read_credited_node, "a", now=2.0),
            "read_shares": lambda: store.read(read_shares, "a", width=10),
            "read_public_receipt": lambda: store.read(read_public_receipt, self.steps, 0),
            "read_facts": lambda: store.read(read_facts, 1),
            "read_owned": lambda: store.read(read_owned, "ab"),
            "read_counts_once": lambda: store.read(read_counts_once, "ab"),
            "read_is_owned": lambda: store.read(read_is_owned, "a", "ab"),
            "read_owned_ids": lambda: store.read(read_owned_ids, "ab"),
            "set_counts_once": lambda: store.write(set_counts_once, "ab", counts_once=True),
            "read_team": lambda: store.read(read_team, "A team", now=2.0),
            "read_own_team": lambda: store.read(read_own_team, "a", now=2.0),
            "read_run_credit": lambda: store.read(read_run_credit, **run, now=2.0),
            "read_known_hubs": lambda: store.read(read_known_hubs),
            "take_in": lambda: store.write(take_in, elsewhere, now=2.0),
            "remove_team": lambda: store.write(remove_team, "A team"),
        }

    def _action_calls(self, store: Store) -> Mapping[str, Callable[[], object]]:
        by = Actor(via="cli", who="ada")
        requests = (
            Pause(),
            Ban(node="a"),
            Unban(node="a"),
            Pardon(node="a"),
            MakeInvite(name="Bo"),
            RevokeInvite(name="Bo"),
            MakeToken(name="Bo", scope="use"),
            RevokeToken(name="Bo"),
            SetTenantQuota(tenant="Bo", tokens_per_day=5),
            BlockTenant(tenant="Bo"),
            UnblockTenant(tenant="Bo"),
        )
        return {
            "note_action": lambda: [store.write(note_action, request, by, now=2.0) for request in requests],
            "settle_action": lambda: store.write(settle_action, ActionSettled(number=1, done=True), now=2.0),
            "find_action": lambda: store.read(find_action, 1),
            "read_wanted_actions": lambda: store.read(read_wanted_actions),
            "read_action_log": lambda: (
                store.read(read_action_log, limit=3),
                store.read(read_action_log, limit=3, before=self.steps),
            ),
            "was_undone": lambda: store.read(was_undone, 1),
            "read_api_tokens": lambda: store.read(read_api_tokens),
            "read_num_api_tokens": lambda: store.read(read_num_api_tokens),
            "read_settings": lambda: store.read(read_settings),
            "begin_settings": lambda: store.write(begin_settings, {"learning_rate": 0.5}),
        }

    @staticmethod
    def _find_events(store: Store) -> None:
        for wanted in (
            EventFilter(),
            EventFilter(kind="node_joined"),
            EventFilter(severity="error"),
            EventFilter(subject="a"),
            EventFilter(before=9),
        ):
            store.read(read_events, wanted, limit=3)

    def _find_all_ways(self, store: Store) -> None:
        """Search for rollouts once through each index, and once by conditions without an index."""
        for wanted in (
            RolloutFilter(),
            RolloutFilter(step=self.steps),
            RolloutFilter(group=self.steps - 1),
            RolloutFilter(node="a"),
            RolloutFilter(version=self.steps),
            RolloutFilter(drop="stale"),
            RolloutFilter(check="failed"),
        ):
            store.read(find_rollouts, wanted, NEWEST, 5)
            if wanted != RolloutFilter():
                store.read(find_rollouts, replace(wanted, state="dropped", reward_min=0.5, tokens_max=9), NEWEST, 5)

    def _one_of_each_record(self, store: Store) -> None:
        evaluation = EvaluationGroup(policy_version=self.steps, greedy=True, number=0).group_id
        lease, group = self.steps + 1_000, self.steps + 1_000
        turns: Sequence[Record] = [
            *self.records.opened(group + 1, evaluation),
            self.records.leased(lease + 1, group + 1, 0, 1),
            self.records.leased(lease + 2, evaluation, 0),
            *self.records.received(f"{lease + 1}-0", f"{lease + 2}-0"),
            ScoreRecorded(
                rollout_id=f"{lease + 1}-0", reward=None, observation_ids=self.records.payload(2).completion_ids
            ),
            AnswerReplaced(rollout_id=f"{lease + 1}-0", reward=1.0),
            SessionNoted(group_id=group + 1, index=0, attempt=0, losses=1, replaced=1),
            ScoreRecorded(rollout_id=f"{lease + 2}-0", reward=1.0),
            RolloutsEvaluated(rollout_ids=(f"{lease + 2}-0",)),
            AnswerOpened(group=_answers(ANSWERS)),
            self.records.leased(lease + 3, ANSWERS, 0),
            *self.records.received(f"{lease + 3}-0"),
            RolloutsAnswered(rollout_ids=(f"{lease + 3}-0",)),
            AnswersCancelled(group_id=ANSWERS, request_id="r"),
            RolloutsDropped(rollout_ids=(f"{lease + 1}-0", f"{lease + 1}-1"), reason=DropReason.STALE),
            GroupsRated(pass_rates=((group + 1, 0.5),)),
            GroupDropped(group_id=group + 1, reason=DropReason.STALE),
            CostAccrued(nodes=(NodeCost("a", 5.0, 0.125), NodeCost("b", 5.0, 0.25))),
            CheckRecorded(rollout_id=f"{lease + 2}-0", checked=Checked.PASSED),
            StandingRecorded(row=StandingRow(node_id="a", num_verified=3)),
            CoarseClassesRecorded(classes=(CoarseClass(NumericsClass("torch", "bf16", "cuda"), 0.25, 0.5),)),
            CheckingCredited(node_id="a", num_tokens=9),
            TrustDecided(node_id="a", decision=Decision.PARDONED, reason="", decided_at=1.0),
            SettingRecorded(setting="max_staleness", stored=3),
            ActionSettled(number=1, done=True),
        ]
        records = [*self.records.one_step(self.steps + 1, lease_id=lease, group_id=group), *turns]
        assert {type(record) for record in records} == set(RECORDS)
        store.apply(records, now=1.0, events=[_event()])

    def _count_large_step(self, store: Store) -> None:
        step = 10 * self.steps
        store.apply(self.records.large_step(step, num_groups=training.COUNTED_AT_ONCE), now=1.0)
        store.count_all()

    @staticmethod
    def _join(store: Store, node_id: str) -> None:
        store.node_seen(node_id=node_id, public_key=bytes(32), name=node_id, backend="torch", device="cpu", now=1.0)

    @staticmethod
    def _release(version: int) -> Release:
        return Release(policy_version=version, adapter_bytes=9, payload_bytes=7, carrier="delta", way=Way.SWARM)

    @staticmethod
    def _arrival(node_id: str, version: int) -> Arrival:
        fetched = Fetched(
            info_hash=version.to_bytes(20), policy_version=version, seconds=1.0, swarm_bytes=7, web_seed_bytes=0
        )
        return Arrival(node_id=node_id, fetched=fetched, broadcast_s=1.0)

    @staticmethod
    def _evaluate(store: Store, version: int) -> None:
        store.record_evaluations(
            [
                Evaluation(
                    policy_version=version,
                    kind=EvaluationKind.GREEDY,
                    num_problems=4,
                    samples=1,
                    num_unscored=0,
                    accuracy=0.5,
                    accuracy_error=0.125,
                    pass_at={},
                    mean_reward=0.5,
                    mean_tokens=3.0,
                    share_truncated=0.25,
                    seconds=2.0,
                    evaluated_at=float(version),
                )
            ]
        )


def _event() -> RunEvent:
    return RunEvent(at=1.0, kind="node_joined", subject="a", text="a has joined")


@contextmanager
def statements_of(calls: Mapping[str, Callable[[], object]]) -> Iterator[list[tuple[str, str, Any]]]:
    """Make each call, and yield its SQL: (name of the call, statement, one set of parameters)."""
    heard: list[tuple[str, str, Any]] = []
    name = ""

    def hear(_connection: Any, _cursor: Any, sql: str, given: Any, _context: Any, many: bool) -> None:
        if re.match(r"SELECT|UPDATE|DELETE", sql):
            heard.append((name, sql, given[0] if many else given))

    listen(Engine, "before_cursor_execute", hear)
    try:
        for name, call in calls.items():  # noqa: B007
            call()
    finally:
        remove(Engine, "before_cursor_execute", hear)
    yield heard


def stops_early(sql: str) -> bool:
    """Return True if the statement reads an index from one end and stops after a few rows. The test that
    counts SQLite's instructions confirms it.
    """
    return re.search(r"ORDER BY \S+ DESC\s+LIMIT \S+( OFFSET \S+)?\s*(\) AS \w+|$)", sql) is not None


def walks_all(node: Mapping[str, Any]) -> bool:
    """Return True if this node of PostgreSQL's plan reads a whole table, or a whole index that is not partial."""
    whole_index = "Index Cond" not in node and node.get("Index Name") not in {None, *PARTIAL}
    return node["Node Type"] == "Seq Scan" or whole_index


def queries_of_the_hub() -> set[str]:
    """Return the names of the functions that the hub passes to a store's `read`, `read_counted` or `write`, directly or
    on a thread.
    """
    found = set()
    for path in HUB.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("echo_hub.store.")
            for name in node.names
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            before = [call.func, *call.args]
            for method, given in pairwise(before):
                is_access = isinstance(method, ast.Attribute) and method.attr in {"read", "read_counted", "write"}
                if is_access and isinstance(given, ast.Name) and given.id in public:
                    found.add(given.id)
    return found


def test_all_that_the_hub_asks_is_tried(tmp_path: Path, records: Any) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    methods = {name for name in vars(Store) if not name.startswith("_")} - {
        "open",
        "close",
        "one_look",
        "read",
        "write",
    }
    asked = queries_of_the_hub() - {"begin_at"}  # `begin_at` is only for an empty database.
    tried = Filled(url="", steps=1, records=records).calls(store).keys()
    assert asked and asked | methods <= tried
    assert AT_OPENING | {name for name, _ in WHOLE} <= tried
    assert {table for _, table in WHOLE if table} <= metadata.tables.keys()
    store.close()


def test_no_daily_statement_scans_a_table_that_grows(tmp_path: Path, records: Any) -> None:
    run = Filled(url=f"sqlite:///{tmp_path / 'echo.db'}", steps=FEW, records=records)
    run.fill()
    store, engine = Store.open(run.url), connect(run.url)
    scans = set()
    with statements_of(run.calls(store)) as heard, engine.connect() as connection:
        for name, sql, given in heard:
            if name in AT_OPENING or stops_early(sql):
                continue
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", given):
                table = re.match(r"SCAN (\w+)(?: USING INDEX (\w+))?", row.detail)
                if table is None or table[1] not in metadata.tables or table[2] in PARTIAL:
                    continue
                if (name, table[1]) not in WHOLE:
                    scans.add(f"{name}: {row.detail}: {' '.join(sql.split())}")
    assert {name for name, _, _ in heard} == run.calls(store).keys(), "every method sends a statement"
    assert not scans, "\n".join(sorted(scans))
    engine.dispose()
    store.close()


def test_postgresql_finds_an_index_for_every_daily_statement(postgresql_url: str, records: Any) -> None:
    """PostgreSQL with sequential scans disabled reads a whole table only if no index fits."""
    engine = connect(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    run = Filled(url=postgresql_url, steps=FEW, records=records)
    run.fill()
    store = Store.open(run.url)
    scans = set()
    with statements_of(run.calls(store)) as heard, engine.connect() as connection:
        connection.execute(text("SET enable_seqscan = off"))
        for name, sql, given in heard:
            if name in AT_OPENING or stops_early(sql):
                continue
            plans = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}", given).scalar_one()
            nodes = [plan["Plan"] for plan in plans]
            for node in nodes:
                nodes += node.get("Plans", [])
                if walks_all(node) and (name, node.get("Relation Name")) not in WHOLE:
                    scans.add(f"{name}: {node['Node Type']} on {node.get('Relation Name')}: {' '.join(sql.split())}")
    assert not scans, "\n".join(sorted(scans))
    store.close()
    engine.dispose()


def test_a_run_sixteen_times_as_long_costs_no_more_a_call(
    tmp_path: Path, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost is the number of SQLite's own instructions, because a query plan does not show how much of an index is
    read.
    """
    for name in ("LOOKED_AT", "LOOKED_BACK"):
        monkeypatch.setattr(browsing, name, 2 * FEW)  # As many rows as the short run has.
    monkeypatch.setattr(old_fetches, "KEPT_VERSIONS", FEW // 2)  # Both runs have versions to forget.
    costs: dict[int, Counter[str]] = {}
    for steps in (FEW, MANY):
        run = Filled(url=f"sqlite:///{tmp_path / f'{steps}.db'}", steps=steps, records=records)
        run.fill()
        costs[steps] = _instructions(run)
    grown = {name: (few, costs[MANY][name]) for name, few in costs[FEW].items() if costs[MANY][name] > 1.5 * few}
    assert {name: cost for name, cost in grown.items() if name not in AT_OPENING | WHOLE_RUN.keys()} == {}


def _instructions(run: Filled) -> Counter[str]:
    done: Counter[str] = Counter()
    name = ""

    def count() -> int:
        done[name] += 1
        return 0

    def prepare(connection: Any, _record: Any) -> None:
        connection.set_progress_handler(count, 1)

    listen(Engine, "connect", prepare)
    try:
        store = Store.open(run.url)
        for name, call in run.calls(store).items():  # noqa: B007
            call()
        store.close()
    finally:
        remove(Engine, "connect", prepare)
    del done[""]
    return done
