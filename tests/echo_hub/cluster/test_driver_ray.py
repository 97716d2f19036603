"""A hub must not wait forever for a Ray actor that exists but never answers."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from echo_hub.cluster import link as links
from echo_hub.cluster.link import ChildLost, RayChild, RayLink
from echo_hub.cluster.parcel import Parcel
from echo_hub.config.scoring_sections import RayConfig
from echo_shared.process.supervised import Command
from tests.echo_hub.cluster.test_actor import ECHO
from tests.ray_cluster import WITHIN_S, RayCluster, kill

pytestmark = pytest.mark.slow


async def test_an_actor_that_does_not_answer_when_a_child_is_to_begin_is_lost_and_replaced(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SILENT_S", 1.0)
    (tmp_path / "echo_child.py").write_text(ECHO)
    parcel = Parcel(contents={"modules/echo_child.py": tmp_path / "echo_child.py"})
    command = Command(module="echo_child", name="the verifier", log=tmp_path / "child.log")

    async def spawned(link: RayLink) -> RayChild:
        return await link.spawn(
            "verifier", "verifier-0", command, answer_s=WITHIN_S, counted="arguments", ending_s=WITHIN_S
        )

    async with (
        asyncio.timeout(WITHIN_S),
        RayLink.open(RayConfig(address=cluster.address), {"verifier": parcel}, owner="run", logs=tmp_path) as link,
    ):
        first = await spawned(link)
        await first.open({"say": "first"})
        (actor,) = cluster.actors()
        await first.stop()
        actor.send_signal(signal.SIGSTOP)
        try:
            second = await spawned(link)
            with pytest.raises(ChildLost, match="no answer in 6 s"):
                await second.open({"say": "second"})
            third = await spawned(link)
            await third.open({"say": "third"})
            assert third.ready["opening"] == {"say": "third"}
        finally:
            kill(actor)
