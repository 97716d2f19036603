"""The tinker SDK itself against the routes: what its users do, and what they see when something fails."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.doors import doors_python
from tests.echo_hub.tenants.conftest import TenantHub
from tests.echo_hub.tinker.conftest import opened

PROGRAMS = (
    "training",
    "sampling",
    "processes",
    "cancelling",
    "resuming",
    "exporting",
    "refusing",
    "custom_loss",
    "many",
)
DROP_BEFORE, DROP_AFTER = 1, 2
"""Faults without an HTTP status: the connection closes before the request reaches the hub, or before the answer returns
to the client."""

FAULTS = {
    "create_model": (503, DROP_AFTER),
    "forward_backward": (DROP_AFTER, 429),
    "optim_step": (DROP_BEFORE, DROP_AFTER),
    "save_weights_for_sampler": (408, DROP_AFTER),
    "asample": (DROP_AFTER, 429, 503, 402),
    "retrieve_future": (408, 500, 502, 400, 429, DROP_AFTER, 503),
    "retrieve_futures": (500, DROP_AFTER),
}
"""Faults that are injected, for each kind of request. The SDK sends the request again after each of them."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all programs of sdk_client.py, run in one process."""
    doors_python()

    async def run() -> dict[str, Any]:
        hub, held = TenantHub(tmp_path_factory.mktemp("hub")), tmp_path_factory.mktemp("sdk") / "held"
        async with opened(hub) as door:
            watch = asyncio.create_task(tell_of_held_draws(hub, held))
            try:
                return await door.run_sdk(*PROGRAMS, HELD=str(held))
            finally:
                watch.cancel()

    return asyncio.run(run())


async def tell_of_held_draws(hub: TenantHub, held: Path) -> None:
    """Keep the file `held` in existence as long as the hub draws a job that never ends."""

    def look() -> None:
        if hub.starter.lives and hub.starter.current.num_held:
            held.touch()
        else:
            held.unlink(missing_ok=True)

    while True:
        look()
        await asyncio.sleep(0.02)


def test_queued_steps_run_in_order(seen):
    found = seen["training"]
    assert found["offered"] == [["Qwen/Qwen3-8B", True]]
    assert found["info"] == ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B", 8]
    assert [step["step:sum"] for step in found["metrics"]] == [1.0, 2.0, 3.0]
    assert [[len(one) for one in passed] for passed in found["logprobs"]] == [[3, 2]] * 3
    assert len(set(found["losses"])) == 3, "each pass sees the weights of the step before it"
    assert found["forward"][0] != found["logprobs"][2][0]
    assert [path.rsplit("/", 2)[1:] for path in found["paths"]] == [["weights", "first"], ["sampler_weights", "first"]]


def test_samples_are_exact_and_have_names(seen):
    found = seen["sampling"]
    assert found["lengths"] == [[6, 6]] * 3
    assert len({tuple(tokens) for tokens in found["tokens"]}) == 3
    assert found["repeats"] and found["copied"], "the same seed must give the same tokens, from a pickled sampler too"
    assert found["ids"] == 9
    assert found["own"] == [1, 3, None]


def test_a_sampler_draws_in_several_processes(seen):
    assert seen["processes"] == {"equal": True, "ids": 6}


def test_cancelled_samples_stop_at_the_hub(seen):
    assert seen["cancelling"] == {"ended": "CancelledError", "after": 4}


def test_loaded_weights_continue_the_run(seen):
    found = seen["resuming"]
    assert found["weights"] == ["Qwen/Qwen3-8B", 8, False]
    assert found["resumed"]
    assert found["runs"] >= 3
    assert found["run"][1:] == ["Qwen/Qwen3-8B", {"renderer_name": "qwen3"}, True]
    assert found["listed"] == [["training", True, True]]
    assert not any("/weights/state" in path for path in found["left"])


def test_exports_are_downloaded_and_decrypted(seen):
    found = seen["exporting"]
    assert found["names"] and found["equal"]
    assert found["closed"] == [f"{name}.age" for name in found["names"]]


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("stable_reinforce", "loss_fn=stable_reinforce"),
        ("top_p", "does not offer top_p"),
        ("top_k", "does not offer top_k"),
        ("base_model", "meta/Other-8B"),
        ("path", "tinker://s:train:0/sampler_weights/none"),
        ("optimizer", "optimizer dimuon"),
    ],
)
def test_users_see_what_was_refused(seen, option, named):
    assert named in seen["refusing"]["seen"][option]


def test_a_model_goes_on_after_a_refused_request(seen):
    found = seen["refusing"]
    assert found["after"] == 1
    assert "RequestFailedError" in found["seen"]["spoiled"], "the gradient lacks what was refused"
    assert found["step"] == {"step:sum": 1.0}


def test_custom_losses_and_thousands_of_data(seen):
    assert seen["custom_loss"]["step"] == {"step:sum": 1.0}
    assert seen["custom_loss"]["metrics"]["pairs"] == 1.0
    found = seen["many"]
    assert (found["outputs"], found["in_order"], found["steps"], found["samples"]) == (2_500, True, 1, 200)


@dataclass
class FaultyProxy:
    """HTTP proxy in front of a hub. It injects error statuses and closes connections."""

    target: str
    faults: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """Faults for each last part of a path, in the order of requests: HTTP statuses, DROP_BEFORE or DROP_AFTER."""
    given: Counter[str] = field(default_factory=Counter)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.rsplit("/", 1)[-1]
        fault = self.faults[name].popleft() if self.faults[name] else 0
        self.given[name] += bool(fault)
        body = await request.read()
        if fault == DROP_BEFORE:
            self._drop(request)
        if fault > DROP_AFTER:
            return web.json_response({"detail": "injected"}, status=fault)
        headers = {key: value for key, value in request.headers.items() if key not in ("Host", "Content-Length")}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.target + request.path_qs, data=body, headers=headers) as reply,
        ):
            content = await reply.read()
        if fault == DROP_AFTER:
            self._drop(request)
        return web.Response(status=reply.status, body=content, content_type=reply.content_type)

    def _drop(self, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/tinker"
        finally:
            await runner.cleanup()


async def test_nothing_is_lost_or_done_twice_by_faults(tmp_path: Path) -> None:
    """At each kind of request, the proxy returns statuses that the SDK retries, and loses requests and answers."""
    doors_python()
    hub = TenantHub(tmp_path)
    async with opened(hub) as door:
        undisturbed = (await door.run_sdk("short"))["short"]
        calls = Counter(name for name, _ in hub.starter.current.calls)
        proxy = FaultyProxy(door.url)
        for name, faults in FAULTS.items():
            proxy.faults[name].extend(faults)
        async with proxy.open() as url:
            disturbed = (await door.run_sdk("short", url=url))["short"]
        assert disturbed == undisturbed
        assert Counter(name for name, _ in hub.starter.current.calls) == calls + calls
        assert {name: proxy.given[name] for name in FAULTS} == {name: len(faults) for name, faults in FAULTS.items()}


async def test_a_sample_whose_result_is_gone_is_drawn_anew(tmp_path: Path) -> None:
    """If the retrieval answers 410, the SDK sends a new sample request with a new number."""
    doors_python()
    async with opened(TenantHub(tmp_path)) as door:
        undisturbed = (await door.run_sdk("short"))["short"]
        proxy = ForgetfulProxy(door.url)
        async with proxy.open() as url:
            assert (await door.run_sdk("short", url=url))["short"] == undisturbed
        assert proxy.given["sample"] == 1


@dataclass
class ForgetfulProxy(FaultyProxy):
    """Answers the first retrieval of a sample with 410."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Tinker-Request-Type") == "Sample" and not self.given["sample"]:
            self.given["sample"] += 1
            return web.json_response({"detail": "injected"}, status=410)
        return await super().answer(request)
