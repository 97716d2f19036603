"""Draw tenants' samples with the run's nodes.

    draw(job) ── gathered for GATHER_S ──> group ── AnswerWanted ──> coordinator ──> leases ──> nodes
        ^                                    |
        └──────── samples <── DeliverAnswer, after the commit ──────────────────────────┘

Jobs with the same prompt, version, parameters and seed that come together become one group: one node then prefills
their prompt once. The coordinator's transaction stores the group before leasing it. After a restart, a repeated job
finds its group: the store returns finished samples, and nodes draw the rest.

Nodes can fetch only the newest versions of the run. A job that names an older one publishes it again.

A group is *settled*, that is deleted from the store, `SETTLE_S` after its last sample was delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.effects import DeliverAnswer
from echo_hub.core.accounting.events import AnswerCancelled, AnswerWanted
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import AnswerGroup, AnswerMember, StreamedTokens
from echo_hub.core.coordinator import Coordinator
from echo_hub.driving.event_queue import EventQueue
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.asked import AskedGroup, AskedGroups, GroupBounds
from echo_hub.store.answers import read_answered, read_next_answer_id, settle_answers
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import read_payloads
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Sample
from echo_shared.errors import CodecError
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import LiveNode
from echo_shared.wire.messages import MAX_GROUP_SIZE, FinishReason
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

GATHER_S: Final = 0.03
"""Seconds for which a job waits for equal jobs, to be drawn with them. Set by hand: a client sends its equal requests
one after the other."""
SETTLE_S: Final = 300.0
"""Seconds for which a delivered group stays in the store: its caller must commit the samples, and the verifier may
check them."""
ROUNDS: Final = 3
"""Number of unfinished samples to aim for, as a multiple of what the connected nodes draw at once. With more than 1,
each node has its next work waiting.
"""
LEAST_WIDTH: Final = 64
"""Smallest number of unfinished samples to aim for, also while no node is connected."""
MOST_CAPACITY: Final = 1_024
"""Maximum capacity, in rollouts, that the hub assumes of one node, even if the node claims more."""
ORPHAN_S: Final = 600.0
"""Seconds after the hub's start at which it cancels requests from before the start that no caller has repeated."""
_NO_TOKENS: Final = np.zeros(0, np.int32)
LOOKED_S: Final = 1.0
"""Seconds between two checks for new tokens of unfinished samples. Nodes send their tokens every few seconds."""


class TenantPublishing(Protocol):
    """Makes tenants' adapters available to nodes. Implemented by `echo_hub.distribution.publishing.Publishing`."""

    async def publish_for_tenant(self, policy_version: int, directory: Path) -> None:
        """Pack the adapter and offer it to nodes, unless it is published already. Raises CodecError if no engine can
        use it."""

    async def withdraw_for_tenant(self, policy_version: int) -> None:
        """Stop offering the adapter, and delete its artefacts."""

    def hold_for_tenants(self, versions: Iterable[int]) -> None:
        """Keep these versions published, however old they are, because unfinished requests name them. Replaces the
        versions of the earlier call."""


class StreamedAnswers(Protocol):
    """Access to the tokens of unfinished samples. Implemented by `echo_hub.intake.partials.Partials`."""

    def answers_under_way(self) -> Iterator[StreamedTokens]:
        """Yield the known tokens of each unfinished sample, except samples without tokens."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job that is being drawn. `out` holds what its caller gets next."""

    job: DrawJob
    out: asyncio.Queue[DrawnPiece | Sample | Refusal] = field(default_factory=asyncio.Queue)
    group_id: int | None = None
    delivered: set[int] = field(default_factory=set)
    streamed: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """Tokens of each index that the caller got as pieces."""

    @property
    def indices(self) -> range:
        return range(self.job.first_index, self.job.first_index + len(self.job.sequence_ids))


@dataclass(slots=True, eq=False)
class _Open:
    """A group that is in the store. `over_at`: the time at which its last sample was delivered or cancelled."""

    group: AnswerGroup
    left: set[int]
    over_at: float | None = None


class NodeDrawer:
    """Drawer that uses the run's nodes. Call `run` while jobs are drawn, and pass each DeliverAnswer to `take`."""

    def __init__(
        self,
        *,
        queue: EventQueue,
        store: AsyncStore,
        asked: AskedGroups,
        bounds: GroupBounds,
        coordinator: Coordinator,
        live: Mapping[str, LiveNode],
        publishing: TenantPublishing,
        directory: RunDirectory,
        streamed: StreamedAnswers,
        restored: Iterable[AnswerGroup] = (),
        answered: Collection[tuple[int, int]] = (),
        is_checking: bool = True,
    ) -> None:
        """`restored`: the groups in the store at the hub's start, already in `asked`. `answered`: group and index of
        each of their finished samples. `is_checking`: True if the hub verifies rollouts."""
        self._queue = queue
        self._store = store
        self._asked = asked
        self._bounds = bounds
        self._coordinator = coordinator
        self._live = live
        self._publishing = publishing
        self._directory = directory
        self._streamed = streamed
        self._is_checking = is_checking
        self._started_at = time.monotonic()
        self._open = {group.group_id: _Open(group, set(group.wanted)) for group in restored}
        for group_id, index in answered:
            self._open[group_id].left.discard(index)
        for one in self._open.values():
            one.over_at = None if one.left else self._started_at
        self._group_of = {
            member.request_id: group_id
            for group_id, one in self._open.items()
            for member in one.group.members
            if not member.is_cancelled
        }
        self._unclaimed = set(self._group_of)
        """Requests from before the hub's start that no caller has repeated yet."""
        self._held: set[int] = set()
        self._waiting: dict[str, _Waiting] = {}
        self._hold()
        self._gathering: dict[Hashable, list[_Waiting]] = {}
        self._next_id: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the caller's side

    async def draw(self, job: DrawJob) -> AsyncIterator[DrawnPiece | Sample]:
        """Yield pieces and finished samples of the job, each sample exactly once. Closing the iterator early cancels
        the unfinished samples."""
        self._check(job)
        waiting = self._waiting[job.request_id] = _Waiting(job)
        self._hold()
        try:
            if 0 < job.policy_version < FIRST_TENANT_VERSION:
                await self.publish(job.policy_version, self._directory.adapter(job.policy_version))
            if job.request_id in self._group_of:
                await self._claim(waiting)
            else:
                self._gather(waiting)
            num_left = len(job.sequence_ids)
            while num_left:
                item = await waiting.out.get()
                if isinstance(item, Refusal):
                    raise item
                num_left -= isinstance(item, Sample)
                yield item
        finally:
            self._end(waiting)
            self._hold()

    async def publish(self, policy_version: int, directory: Path) -> None:
        try:
            await self._publishing.publish_for_tenant(policy_version, directory)
        except CodecError as error:
            raise Refusal(RefusalKind.INVALID, error.what, got=error.got, do=error.do) from error

    async def withdraw(self, policy_version: int) -> None:
        await self._publishing.withdraw_for_tenant(policy_version)

    def width(self) -> int:
        return max(LEAST_WIDTH, ROUNDS * sum(min(node.capacity, MOST_CAPACITY) for node in self._live.values()))

    def state(self) -> str:
        if self._coordinator.settings.leasing == "paused":
            return "The operator has paused the hub, so no samples are drawn."
        num_ready = sum(node.capacity > 0 for node in self._live.values())
        if num_ready:
            return ""
        return f"{num_ready} of {len(self._live)} connected nodes take work." if self._live else "No node is connected."

    # --- the hub's side

    async def run(self) -> None:
        """Stream new tokens to jobs, and delete delivered groups from the store after a while, until cancelled."""
        settled_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(LOOKED_S)
                self._stream()
                self._refuse_unusable()
                now = time.monotonic()
                if now - settled_at >= 10 * LOOKED_S:
                    settled_at = now
                    await self._let_go(now)
        finally:
            for task in self._tasks:
                task.cancel()

    def take(self, action: DeliverAnswer) -> None:
        """Give a committed sample to its job. A job that comes later reads it from the store."""
        one = self._open.get(action.group_id)
        if one is None:
            return
        self._note_over(one, (action.index,))
        waiting = self._waiter(one.group, action.index)
        if waiting is None or waiting.group_id is None:
            return
        if action.payload is not None:
            self._give(waiting, action.index, action.payload, action.node_id)
        else:
            self._do(self._read(waiting))

    def _check(self, job: DrawJob) -> None:
        end = job.first_index + len(job.sequence_ids)
        if end > MAX_GROUP_SIZE:
            raise Refusal(
                RefusalKind.INVALID,
                "A request asks for too many samples.",
                got=f"samples up to number {end}",
                do=f"Ask for at most {MAX_GROUP_SIZE} samples of one prompt.",
                param="num_samples",
            )
        if job.checked and not self._is_checking:
            raise Refusal(
                RefusalKind.INVALID,
                "This hub checks no samples, so it cannot deliver only checked ones.",
                got="checked = true; trust.verifier = off",
                do="Ask without `checked`, or ask the operator to switch the verifier on.",
                param="checked",
            )
        if job.request_id in self._waiting:
            raise Refusal(RefusalKind.INVALID, "This request is already being drawn.", got=job.request_id)

    async def _claim(self, waiting: _Waiting) -> None:
        """Give the job its stored group: a group from an earlier start of the hub, or of the same finished request."""
        request_id = waiting.job.request_id
        self._unclaimed.discard(request_id)
        waiting.group_id = self._group_of[request_id]
        await self._read(waiting)

    async def _read(self, waiting: _Waiting) -> None:
        """Read the job's finished samples from the store, and deliver those that were not delivered before."""
        assert waiting.group_id is not None
        answered = await self._store.read(read_answered, [waiting.group_id])
        names = {
            name: index
            for (_, index), name in answered.items()
            if index in waiting.indices and index not in waiting.delivered
        }
        for stored in await self._store.read(read_payloads, list(names)):
            drawer = stored.payload.spans[-1].node_id if stored.payload.spans else ""
            self._give(waiting, names[stored.rollout_id], stored.payload, drawer)

    def _gather(self, waiting: _Waiting) -> None:
        key = _key(waiting.job)
        together = self._gathering.setdefault(key, [])
        together.append(waiting)
        if len(together) == 1:
            self._do(self._begin_later(key))

    async def _begin_later(self, key: Hashable) -> None:
        await asyncio.sleep(GATHER_S)
        if self._next_id is None:
            next_id = await self._store.read(read_next_answer_id)
            if self._next_id is None:
                self._next_id = max(next_id, *(group_id + 1 for group_id in (*self._open, 0)))
        together = [one for one in self._gathering.pop(key) if one.job.request_id in self._waiting]
        while together:
            members, others, taken = list[_Waiting](), list[_Waiting](), set[int]()
            for one in together:
                if taken.isdisjoint(one.indices):
                    members.append(one)
                    taken.update(one.indices)
                else:  # The client has given the same seed twice.
                    others.append(one)
            await self._begin(members, self._next_id)
            self._next_id += 1
            together = others

    async def _begin(self, members: list[_Waiting], group_id: int) -> None:
        job = members[0].job
        group = AnswerGroup(
            group_id=group_id,
            tenant_id=job.tenant_id,
            prompt_ids=job.prompt_ids,
            policy_version=job.policy_version,
            seed=job.seed,
            sampling=_sampling(job),
            is_checked=job.checked,
            members=tuple(
                AnswerMember(
                    request_id=one.job.request_id,
                    num_samples=len(one.job.sequence_ids),
                    first_index=one.job.first_index,
                )
                for one in members
            ),
        )
        self._open[group_id] = _Open(group, set(group.wanted))
        for one in members:
            one.group_id = self._group_of[one.job.request_id] = group_id
        self._asked.add(group_id, AskedGroup(prompt_ids=group.prompt_ids, seed=group.seed, sampling=group.sampling))
        self._hold()
        await self._queue.put(AnswerWanted(group=group))

    def _end(self, waiting: _Waiting) -> None:
        """Forget a job, and cancel its unfinished samples."""
        request_id, group_id = waiting.job.request_id, waiting.group_id
        self._waiting.pop(request_id, None)
        if group_id is not None and len(waiting.delivered) < len(waiting.job.sequence_ids):
            self._cancel(group_id, request_id)

    def _cancel(self, group_id: int, request_id: str) -> None:
        self._group_of.pop(request_id, None)
        self._do(self._queue.put(AnswerCancelled(group_id=group_id, request_id=request_id)))
        one = self._open.get(group_id)
        if one is not None:
            cancelled = (member.indices for member in one.group.members if member.request_id == request_id)
            self._note_over(one, [index for indices in cancelled for index in indices])

    def _note_over(self, one: _Open, indices: Iterable[int]) -> None:
        one.left.difference_update(indices)
        if not one.left and one.over_at is None:
            one.over_at = time.monotonic()
            self._hold()

    def _hold(self) -> None:
        held = {one.group.policy_version for one in self._open.values() if one.left}
        held |= {waiting.job.policy_version for waiting in self._waiting.values()}
        if held != self._held:
            self._held = held
            self._publishing.hold_for_tenants(held)

    def _waiter(self, group: AnswerGroup, index: int) -> _Waiting | None:
        for member in group.members:
            if index in member.indices:
                return self._waiting.get(member.request_id)
        return None

    def _give(self, waiting: _Waiting, index: int, payload: RolloutPayload, node_id: str) -> None:
        if index in waiting.delivered:
            return
        waiting.delivered.add(index)
        place = index - waiting.job.first_index
        waiting.out.put_nowait(
            Sample(
                sequence_id=waiting.job.sequence_ids[place],
                index=place,
                token_ids=payload.completion_ids,
                logprobs=payload.behavior_logprobs,
                finish="length" if payload.finish_reason is FinishReason.LENGTH else "stop",
                drawn_by=node_id,
            )
        )

    def _stream(self) -> None:
        """Give jobs the new tokens of their unfinished samples. Only tokens from proven nodes (whose work was verified
        before) are streamed, and none to jobs that want checked samples."""
        if not self._waiting:
            return
        for part in self._streamed.answers_under_way():
            one = self._open.get(part.group_id)
            waiting = None if one is None else self._waiter(one.group, part.index)
            if waiting is None or waiting.job.checked or part.index in waiting.delivered:
                continue
            before = waiting.streamed.get(part.index, _NO_TOKENS)
            count = len(before)
            if len(part.token_ids) <= count or not np.array_equal(part.token_ids[:count], before):
                continue  # Nothing new, or another node draws other tokens: wait for the finished sample.
            stops = self._bounds.of(part.group_id).stop_strings
            if not self._coordinator.is_proven(part.node_id) or stops.end(part.token_ids) is not None:
                continue
            waiting.streamed[part.index] = part.token_ids
            waiting.out.put_nowait(
                DrawnPiece(
                    index=part.index - waiting.job.first_index,
                    start=count,
                    token_ids=part.token_ids[count:],
                    logprobs=part.logprobs[count:],
                )
            )

    def _refuse_unusable(self) -> None:
        """Fail the jobs whose adapter no node can use: they would wait for ever."""
        for waiting in self._waiting.values():
            if self._coordinator.is_unusable(waiting.job.policy_version):
                waiting.out.put_nowait(
                    Refusal(
                        RefusalKind.INVALID,
                        "Nodes cannot draw with these weights: they give values that are not finite.",
                        got=f"version {waiting.job.policy_version}",
                        do="Load earlier weights, and train on with a smaller learning_rate.",
                    )
                )

    async def _let_go(self, now: float) -> None:
        for request_id in list(self._unclaimed):
            version = self._open[self._group_of[request_id]].group.policy_version
            # Only requests without a session name versions of the run. Such a request ends with the hub.
            if now - self._started_at > ORPHAN_S or 0 < version < FIRST_TENANT_VERSION:
                self._unclaimed.discard(request_id)
                self._cancel(self._group_of[request_id], request_id)
        over = [
            group_id
            for group_id, one in self._open.items()
            if one.over_at is not None
            and now - one.over_at > SETTLE_S
            and not any(member.request_id in self._waiting for member in one.group.members)
        ]
        if over:
            await self._store.write(settle_answers, over)
        for group_id in over:
            for member in self._open.pop(group_id).group.members:
                self._group_of.pop(member.request_id, None)
                self._unclaimed.discard(member.request_id)
            self._asked.remove(group_id)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sampling(job: DrawJob) -> SamplingParameters:
    return SamplingParameters(
        temperature=job.temperature,
        max_tokens=job.max_tokens,
        stop_ids=job.stop_ids,
        stop_strings=job.stop_strings,
    )


def _key(job: DrawJob) -> Hashable:
    """Return a key that equal jobs share: jobs with the same key form one group."""
    return job.tenant_id, job.policy_version, job.prompt_ids.tobytes(), _sampling(job), job.seed, job.checked
