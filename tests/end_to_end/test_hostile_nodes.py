"""Handwritten hostile clients speak the real protocol on real sockets. False claims may harm only the client that makes
them.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import pytest

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.intake.partials import PartRefusal
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.serving.hub import Hub
from echo_hub.serving.opening import open_hub
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import (
    Goodbye,
    Lease,
    LeaseReturned,
    NodeStatus,
    ReceiptState,
    ReceiptsWanted,
    RefusalCode,
    Refused,
    rollout_id,
)
from tests.end_to_end.strangers import Stranger, body, completion, part, parts

pytestmark = pytest.mark.timeout(300)

DEADLINE_S: Final = 60.0
MAX_TOKENS: Final = 24


async def last_word(node: Stranger) -> Refused:
    await node.until(lambda: node.ended)
    assert node.refused is not None
    return node.refused


async def holds(node: Stranger, lease: Lease) -> None:
    await node.until(lambda: lease.lease_id in node.leases)


class Site:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._num = 0

    async def stranger(self, me: Identity | None = None, **changes: Any) -> Stranger:
        """Connect with a new key; `changes` replace fields of the join request."""
        self._num += 1
        return await Stranger(self.hub.url, me).join(**{"name": f"n{self._num}", **changes})

    async def view(self) -> Any:
        return await self.hub.pages.run_view()

    async def page(self, path: str) -> str:
        operator = {"Authorization": f"Bearer {self.hub.guard.credentials.token}"}
        async with aiohttp.ClientSession(self.hub.url, headers=operator) as http, http.get(path) as answer:
            text = await answer.text()
            assert answer.status == 200, (path, answer.status, text)
            return text

    async def pages(self) -> dict[str, str]:
        return {
            path: await self.page(path) for path in ("/", "/leaderboard", "/metrics", "/api/v1/run", "/api/v1/nodes")
        }


@asynccontextmanager
async def attacked(root: Path, **sections: dict[str, Any]) -> AsyncIterator[Site]:
    directory = RunDirectory(root / "run")
    make_run(directory, HubConfig())
    small: dict[str, dict[str, Any]] = {
        "run": {"mode": "async"},
        "server": {"port": 0, "shared_memory": False},
        "learner": {"threads": 1},
        "sampling": {"max_tokens": MAX_TOKENS},
        "trust": {"verifier": "off"},  # These clients send invented tokens, which a verifier would convict.
        "evaluation": {"problems": 1},
        "training": {"steps": 4, "groups_per_step": 8, "group_size": 4, "lora_rank": 2},
    }
    merged = {name: {**small.get(name, {}), **sections.get(name, {})} for name in small.keys() | sections.keys()}
    async with open_hub(load_config(directory.config, merged), directory) as hub:
        serving = asyncio.create_task(hub.serve())
        try:
            yield Site(hub)
        finally:
            assert not serving.done(), serving
            serving.cancel()
            await asyncio.wait([serving])


def spans(*of: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [{"policy_version": version, "num_tokens": count} for version, count in of]


async def check_books(site: Site, *, invalid: int) -> None:
    """Check that all leased rollouts are accounted for, and that `invalid` of them were refused."""
    accounting = (await site.view()).accounting
    ends = accounting.trained + accounting.evaluated + sum(accounting.dropped.values())
    assert accounting.leased == ends + accounting.in_flight
    assert accounting.dropped.get("invalid", 0) == invalid


NO_SPANS: Final = (
    *(spans((0, 0)), spans((0, -4)), spans((0, 2**40)), spans((0, 4.0)), spans((0, math.nan))),
    *(spans((-1, 4)), spans((2**31, 4)), spans(("x", 4)), spans((None, 4))),
    *(spans((0, 1)) * 65, spans((0, 1)) * 50_000, {}, 4, [[0, 4]]),
)
"""Values of a rollout's version spans (version, number of tokens) that make the message invalid, so that the hub closes
the connection.
"""
FALSE_SPANS: Final = (
    *(spans((0, 3)), spans((0, 5)), spans((0, 2), (0, 2)), spans((1, 2), (0, 2)), spans((0, 2), (1, 2))),
    *(spans((1, 4)), spans((2**31 - 1, 4)), spans((0, 131_072)) * 64),
)
"""Well-formed version spans (version, number of tokens) that cannot be true: the rollout has four tokens, and there is
only version 0.
"""


async def test_false_claims_cost_their_own_rollouts_alone(tmp_path: Path) -> None:
    async with attacked(tmp_path) as site:
        invalid = await impossible_lengths(site)
        await false_introductions(site)
        await false_version_spans(site, invalid)


async def false_version_spans(site: Site, invalid: int) -> None:
    good = await site.stranger()
    await good.report(4)
    held = await good.lease()
    for versions in NO_SPANS:
        bad = await site.stranger()
        await bad.report(1)
        lease = await bad.lease()
        await bad.say_raw(completion(lease, lease.indices[0]), versions=versions)
        refused = await last_word(bad)
        assert refused.code == "remote_protocol" and "rollout.versions" in refused.what, refused
        assert len(refused.what) < 400
    for versions in FALSE_SPANS:
        bad = await site.stranger()
        await bad.report(1)
        lease = await bad.lease()
        sent = completion(lease, lease.indices[0])
        await bad.say_raw(sent, versions=versions)
        assert await bad.outcome(sent) is ReceiptState.DROPPED
    await check_books(site, invalid=invalid + len(FALSE_SPANS))
    for index in held.indices:
        sent = completion(held, index)
        await good.say(sent)
        assert await good.outcome(sent) is ReceiptState.SCORED
    await check_books(site, invalid=invalid + len(FALSE_SPANS))
    await site.pages()


async def impossible_lengths(site: Site) -> int:
    """Send completions of impossible length; return their number. They must not change the hub's estimate of completion
    lengths, by which it decides how much work nodes get.
    """
    ids, lengths = np.full(131_072, 5, np.int32), (0, MAX_TOKENS + 1, 131_072)
    for length in lengths:
        bad = await site.stranger()
        await bad.report(1)
        lease = await bad.lease()
        sent = completion(lease, lease.indices[0], completion_ids=ids[:length])
        await bad.say(sent)
        assert await bad.outcome(sent) is ReceiptState.DROPPED
    await check_books(site, invalid=len(lengths))
    assert site.hub._resources.coordinator._ledger.lengths.mean_tokens == 0.0, "nothing was seen"
    return len(lengths)


async def false_introductions(site: Site) -> None:
    """A node's introduction can neither relax the checks of its rollouts nor imitate other nodes."""
    for said, why in (
        ({"backend": "quantum"}, "engine is unknown here (known: llama_cpp"),
        ({"name": "аdmin"}, "like that of the hub or its operator"),
        ({"name": "The Hub"}, "like that of the hub or its operator"),
        ({"name": "Ada\u202e"}, "remove U+202E RIGHT-TO-LEFT OVERRIDE"),
        ({"name": "\u3164"}, "remove U+3164"),
    ):
        refused = (await site.stranger(**said)).refused
        assert refused is not None and why in refused.what, refused
    node = await site.stranger()
    status = NodeStatus(activity="waiting", capacity=1, policy_version=0, tokens_per_s=1.0)
    await node.say_raw(status, precision="q1_xxl")
    assert "precision is unknown here (known: f32" in (await last_word(node)).what


async def until_taken(site: Site, node: Stranger, lease: Lease) -> None:
    """Wait until the hub has processed every message of the node: it answers a query that the node sends last."""
    known = rollout_id(lease.lease_id, lease.indices[0])
    node.states.pop(known, None)
    await node.say(ReceiptsWanted(rollout_ids=(known,)))
    await node.until(lambda: known in node.states)


async def test_hostile_streams_leave_other_nodes_work_untouched_and_memory_bounded(tmp_path: Path) -> None:
    async with attacked(tmp_path) as site:
        partials = site.hub.partials
        good, bad = await site.stranger(), await site.stranger()
        await good.report(2)
        await bad.report(2)
        held, lease = await good.lease(), await bad.lease()
        mine, index = held.indices[0], lease.indices[0]
        drawn, stop = body(index, 8), lease.stop_ids[0]
        await good.say(parts(part(held, mine, 0, body(mine, 3))))
        await until_taken(site, good, held)
        before = partials.prefix(held.lease_id, mine)
        size = partials.num_bytes

        await bad.say(parts(part(lease, index, 0, drawn[:4])))
        unknown = lease.model_copy(update={"lease_id": 2**53})
        for streamed in (
            *(part(held, mine, 0, drawn), part(held, mine, 3, drawn), part(unknown, 0, 0, drawn)),
            *(part(lease, 1_000, 0, drawn), part(lease, index, 0, drawn[::-1]), part(lease, index, 5, drawn)),
            *(part(lease, index, 4, [token]) for token in (-1, 2**31 - 1, stop)),
            *(part(lease, index, 4, [5] * count) for count in (MAX_TOKENS - 4, 60_000)),
            *(part(lease, index, 4, drawn[:1], logprob=1.0), part(lease, index, 4, drawn[:1], version=1)),
            *(part(lease, index, 131_071, drawn[:1]), part(lease, index, 0, drawn[:2], version=1)),
        ):
            await bad.say(parts(streamed))
        await until_taken(site, bad, lease)
        assert partials.refused == {
            PartRefusal.NOT_LEASED: 4,
            PartRefusal.DIFFERENT: 2,
            PartRefusal.GAP: 1,
            PartRefusal.BAD_TOKEN: 3,
            PartRefusal.TOO_LONG: 3,
            PartRefusal.BAD_LOGPROB: 1,
            PartRefusal.BAD_VERSION: 1,
        }
        kept = partials.prefix(lease.lease_id, index)
        assert kept is not None and kept.ids.tolist() == drawn[:4]
        assert partials.num_bytes - size == 8 * 4

        flood = bad.session.send(parts(*[part(lease, index, 0, drawn[:2])] * 1_024))
        for _ in range(16):
            await bad.socket.send(flood)
        await good.say(parts(part(held, mine, 3, body(mine, 4)[3:])))
        await until_taken(site, good, held)
        await until_taken(site, bad, lease)
        assert partials.num_bytes - size == 8 * 5, "repeated parts take no memory"
        after = partials.prefix(held.lease_id, mine)
        assert before is not None and after is not None
        assert (after.ids.tolist(), before.ids.tolist()) == (body(mine, 4), body(mine, 3))

        await bad.say(LeaseReturned(lease_id=lease.lease_id, indices=lease.indices, reason="done"))
        await bad.say(parts(part(lease, index, 4, drawn[4:5])))
        await until_taken(site, bad, lease)
        assert partials.refused[PartRefusal.NOT_LEASED] == 5, "returned rollouts accept no more parts"
        finished = completion(held, mine, completion_ids=np.array([*body(mine, 4), stop], np.int32))
        await good.say(finished)
        assert await good.outcome(finished) is ReceiptState.SCORED
        await check_books(site, invalid=0)

        for wrong in (math.nan, math.inf):
            await bad.say(parts(part(lease, index, 4, drawn[4:5], logprob=wrong)))
            assert "not finite" in (await last_word(bad)).what
            soon = await site.stranger(bad.me)
            assert soon.refused is not None and soon.refused.code == RefusalCode.TOO_SOON
            bad = await site.stranger()


async def test_a_node_that_changes_a_given_prefix_is_blamed_not_its_first_sampler(tmp_path: Path) -> None:
    async with attacked(tmp_path) as site:
        first = await site.stranger()
        await first.report(8)
        await first.until(lambda: sum(len(lease.indices) for lease in first.leases.values()) >= 4)
        works, *begins = [(lease, index) for lease in first.leases.values() for index in lease.indices][:4]
        done = completion(*works)
        await first.say(done)
        assert await first.outcome(done) is ReceiptState.SCORED
        for lease, index in begins:
            await first.say(parts(part(lease, index, 0, body(index, 3))))
        for lease in first.leases.values():
            unfinished = [index for index in lease.indices if (lease, index) != works]
            if unfinished:
                await first.say(LeaseReturned(lease_id=lease.lease_id, indices=tuple(unfinished), reason="done"))
        await first.say(Goodbye())

        second = await site.stranger()
        await second.report(8)
        await second.until(lambda: sum(len(lease.prefixes) for lease in second.leases.values()) == len(begins))
        given = [(lease, one) for lease in second.leases.values() for one in lease.prefixes]
        (a, lie_a), (b, lie_b), (c, lie_c) = given
        other = np.array([*body(lie_a.index, 2), body(9, 10)[-1], a.stop_ids[0]], np.int32)
        dearer = np.array([-1.0, -1.0, -2.0, -1.0], np.float32)
        assert other.tolist() != completion(a, lie_a.index).completion_ids.tolist()
        lies = (
            completion(a, lie_a.index, completion_ids=other, num_given=3),
            completion(b, lie_b.index, behavior_logprobs=dearer, num_given=3),
            completion(c, lie_c.index, num_given=2),
        )
        for lie in lies:
            await second.say(lie)
            assert await second.outcome(lie) is ReceiptState.DROPPED
        await check_books(site, invalid=3)
        nodes = site.hub._resources.coordinator._nodes
        assert nodes.get(second.me.node_id).num_failures > 0 and nodes.is_proven(first.me.node_id)
        assert site.hub.partials.tokens_saved == 0


NO_COSTS: Final = (math.nan, math.inf, -math.inf, -1e-9, 1e308, 1_000.1, 2**64 - 1, "1", True, None, [1.0])


async def test_for_any_claimed_costs_and_speeds_pages_show_numbers_and_the_cap_holds(tmp_path: Path) -> None:
    cap = 5.0
    async with attacked(tmp_path, cost={"spend_cap_per_hour": cap, "electricity_per_kwh": 0.5}) as site:
        for claim in NO_COSTS:
            refused = (await site.stranger(cost_per_hour=claim)).refused
            assert refused is not None and "proof.cost_per_hour" in refused.what
        for claim in (math.nan, math.inf, -1.0, 1e308, "1"):
            refused = (await site.stranger(power_watts=claim)).refused
            assert refused is not None and "proof.power_watts" in refused.what

        began_at = asyncio.get_running_loop().time()
        fast = [await site.stranger() for _ in range(3)]
        for node in fast:
            await node.report(0, tokens_per_s=1e308)
        tiny = await site.stranger(cost_per_hour=5e-324)
        await tiny.report(1)
        await tiny.lease()
        for text in (await site.pages()).values():
            assert not re.search(r"\b(nan|infinity)\b|(?<![+\w\"])inf\b", text, re.IGNORECASE)

        shifty = await site.stranger()
        await shifty.report(4)
        lease = await shifty.lease()
        for cost in (4.0, 1_000.0, 0.0, 4.9, 1e-300, 1_000.0):
            await shifty.socket.close()
            shifty = await site.stranger(shifty.me, cost_per_hour=cost)
            await shifty.report(4)
            await holds(shifty, lease)
            assert (await site.view()).cost.spend_per_hour <= cap
        dear = await site.stranger(cost_per_hour=1_000.0, power_watts=100_000.0)
        await dear.report(4096)
        await dear.until(lambda: dear.standby is not None)
        assert dear.standby is not None and dear.standby.reason == "spend_cap" and not dear.leases
        sent = completion(lease, lease.indices[0])
        await shifty.say(sent)
        assert await shifty.outcome(sent) is ReceiptState.SCORED
        view = await site.view()
        lasted_s = asyncio.get_running_loop().time() - began_at
        assert view.cost.spend_per_hour <= cap and 0 <= view.cost.total <= cap * lasted_s / 3600
        await check_books(site, invalid=0)
