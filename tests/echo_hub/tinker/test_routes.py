"""The routes over plain HTTP: statuses at each moment, held requests, limits, and other tenants' objects."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from echo_hub.tenants.access import TenantAccess
from echo_hub.tenants.outcomes import Pending
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tinker import sampling, wire
from echo_hub.tinker.bodies import MOST_JSON_BYTES
from echo_hub.tinker.protobuf import put_bytes, put_number
from echo_hub.tinker.training_body import MOST_BODY_BYTES
from tests.echo_hub.tenants.conftest import TenantHub
from tests.echo_hub.tinker.conftest import TinkerDoor, opened
from tests.echo_hub.tinker.test_training_body import datum, int64, tensor

MODEL = "Qwen/Qwen3-8B"
PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Client:
    """A tenant's client of a port."""

    def __init__(self, door: TinkerDoor, session: aiohttp.ClientSession, *, prefix: str = wire.PREFIX) -> None:
        self.door = door
        self._session = session
        self._prefix = prefix

    async def ask(self, path: str, body: Any = None, *, method: str = "POST", **options: Any) -> tuple[int, Any]:
        """Send a request; return the status and the JSON answer, or the bytes of any other answer."""
        if body is not None and not isinstance(body, bytes):
            options["json"] = body
        elif body is not None:
            options["data"] = body
        url = URL(self.door.url + self._prefix + path, encoded=True)
        headers = {"X-API-Key": self.door.key} | options.pop("headers", {})
        async with self._session.request(method, url, headers=headers, **options) as answer:
            content = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(content) if is_json else content

    async def session_id(self) -> str:
        return (await self.ask("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"}))[1][
            "session_id"
        ]

    async def model_id(self, **options: Any) -> str:
        body = {
            "session_id": await self.session_id(),
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 8},
        }
        _, answer = await self.ask("/create_model", body | options)
        return (await self.outcome(answer["request_id"]))[1]["model_id"]

    async def sampler_id(self) -> str:
        body = {"session_id": await self.session_id(), "sampling_session_seq_id": 0, "base_model": MODEL}
        return (await self.ask("/create_sampling_session", body))[1]["sampling_session_id"]

    async def outcome(self, request_id: str, **options: Any) -> tuple[int, Any]:
        return await self.ask("/retrieve_future", {"request_id": request_id, **options})

    async def sample(self, sampler_id: str, seq_id: int = 0, **options: Any) -> tuple[int, Any]:
        body = {"sampling_session_id": sampler_id, "seq_id": seq_id, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
        return await self.ask("/asample", body | {"sampling_params": {"max_tokens": 3}} | options)


@pytest.fixture
async def hub(tmp_path: Path) -> TenantHub:
    return TenantHub(tmp_path)


@pytest.fixture
async def client(hub: TenantHub) -> AsyncIterator[Client]:
    async with opened(hub) as door, aiohttp.ClientSession() as session:
        yield Client(door, session)


def forward_backward(model_id: str, seq_id: int, *data: bytes, loss: str = "cross_entropy") -> bytes:
    out = bytearray()
    put_bytes(out, 1, model_id.encode())
    put_number(out, 2, seq_id)
    for one in data:
        put_bytes(out, 3, one)
    put_bytes(out, 4, loss.encode())
    return bytes(out)


GOOD = datum(b"\5\0\0\0", target_tokens=tensor(dtype=2, dense=int64(3)))


async def test_requests_without_a_valid_token_are_refused(client: Client) -> None:
    for key in ("", "tml-nonsense", client.door.key[4:] + "x"):
        status, answer = await client.ask("/create_session", {}, headers={"X-API-Key": key})
        assert (status, answer["code"]) == (401, "unauthorized")
    status, _ = await client.ask("/whoami", {})
    assert status == 404


async def test_sessions_warn_of_what_is_not_offered(client: Client) -> None:
    status, answer = await client.ask("/create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})
    assert status == 200
    for option in ("train_unembed", "top_p", "top_k", "stable_reinforce", "strangers"):
        assert option in answer["warning_message"]
    session_id = answer["session_id"]
    assert (await client.ask("/session_heartbeat", {"session_id": session_id}))[0] == 200
    assert (await client.ask(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None}))[
        0
    ] == 200
    assert (await client.ask("/session_heartbeat", {"session_id": session_id}))[0] == 410
    assert (await client.ask("/session_heartbeat", {"session_id": "s-unknown"}))[0] == 410


async def test_settings_tell_clients_to_poll_once_for_a_sampler(client: Client) -> None:
    _, config = await client.ask("/client/config", {"sdk_version": "0.38.0"})
    assert config["sample_use_retrieve_futures"] and not config["pjwt_auth_enabled"]
    assert config["fwdbwd_max_chunk_bytes_count"] < MOST_BODY_BYTES
    _, dynamic = await client.ask("/client/dynamic_config", {"sdk_version": "0.38.0"})
    assert dynamic["sample_cancel_enabled"]
    assert await client.ask("/telemetry", b"x" * 100_000) == (200, {"status": "accepted"})


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"sampling_params": {"top_p": 0.5}}, "top_p"),
        ({"sampling_params": {"top_k": 40}}, "top_k"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
        ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt.chunks[0]"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt.chunks[0].tokens[0]"),
        ({"prompt": {"chunks": [{"tokens": [[[[[]]]]]}]}}, "prompt.chunks[0].tokens[0]"),
        ({"num_samples": 0}, "num_samples"),
        ({"new_option": 1}, "new_option"),
    ],
)
async def test_sampling_options_are_refused_by_name(client: Client, options: dict[str, Any], param: str) -> None:
    status, answer = await client.sample(await client.sampler_id(), **options)
    assert (status, answer["code"], answer["param"]) == (400, "invalid", param)
    assert param.rsplit(".", 1)[-1].partition("[")[0] in answer["detail"] or param == "prompt.chunks[0]"


async def test_samples_arrive_as_protobuf_and_repeat_exactly(client: Client) -> None:
    sampler_id = await client.sampler_id()
    status, first = await client.sample(sampler_id, num_samples=3)
    assert status == 200
    assert len(first["sample_sequence_ids"]) == 3
    assert (await client.sample(sampler_id, num_samples=3))[1] == first, "the same number is the same request"
    target = {"sampling_session_id": sampler_id}
    _, finished = await client.ask("/retrieve_futures", {"target": target})
    assert finished["completions"] == [{"request_id": first["request_id"], "state": "finished"}]
    status, message = await client.outcome(first["request_id"])
    assert isinstance(message, bytes) and len(message) > 3 * 24
    held = {"target": target, "prev_cursor": finished["cursor"], "timeout": 0}
    _, after = await client.ask("/retrieve_futures", held | {"retrieved_request_ids": [first["request_id"]]})
    assert after["completions"] == []


async def test_large_results_are_announced_first(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "INLINE_BYTES", 8)
    _, asked = await client.sample(await client.sampler_id())
    _, announced = await client.outcome(asked["request_id"], allow_metadata_only=True)
    assert announced == {"status": "complete_metadata", "response_payload_size": 24}
    _, message = await client.outcome(asked["request_id"])
    assert isinstance(message, bytes)


async def test_outcomes_are_held_and_say_why_they_wait(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "HOLD_S", 0.4)
    model_id = await client.model_id()
    _, step = await client.ask("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    began = time.monotonic()
    status, waiting = await client.outcome(step["request_id"])
    assert time.monotonic() - began >= 0.4
    assert (status, waiting["type"], waiting["queue_state"]) == (200, "try_again", "paused_capacity")
    assert waiting["queue_state_reason"]
    body = forward_backward(model_id, 1, GOOD)
    assert (await client.ask("/forward_backward", body, headers=PROTOBUF))[0] == 200
    assert "metrics" in (await client.outcome(step["request_id"]))[1]


async def test_a_refused_request_does_not_block_the_next(client: Client) -> None:
    model_id = await client.model_id()
    status, answer = await client.ask(
        "/forward_backward", forward_backward(model_id, 1, GOOD, loss="stable_reinforce"), headers=PROTOBUF
    )
    assert (status, answer["param"]) == (400, "loss_fn")
    adam = {"model_id": model_id, "seq_id": 2, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}
    status, answer = await client.ask("/optim_step", adam)
    assert (status, answer["param"]) == (400, "optimizer_params")
    status, answer = await client.ask("/save_weights", {"model_id": model_id, "seq_id": 3, "path": "../up"})
    assert (status, answer["param"]) == (400, "path")
    path = f"tinker://{model_id}/weights/none"
    load = {"model_id": model_id, "seq_id": 4, "path": path, "optimizer": True}
    assert (await client.ask("/load_weights", load))[0] == 404
    save = {"model_id": model_id, "seq_id": 5, "sampling_session_seq_id": 10**12}
    assert (await client.ask("/save_weights_for_sampler", save))[0] == 400
    _, accepted = await client.ask("/forward_backward", forward_backward(model_id, 6, GOOD), headers=PROTOBUF)
    status, message = await client.outcome(accepted["request_id"])
    assert status == 200 and isinstance(message, bytes)


async def test_bodies_are_limited(client: Client) -> None:
    async def body(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100_000 + 1):
            yield bytes(100_000)

    sized = {**PROTOBUF, "Content-Length": str(MOST_BODY_BYTES + 100_000)}
    for headers, data in ((PROTOBUF, body(MOST_BODY_BYTES)), (sized, io.BytesIO(bytes(MOST_BODY_BYTES + 100_000)))):
        status, answer = await client.ask("/forward_backward", data=data, headers=headers)
        assert (status, answer["code"]) == (413, "too_large")
    status, _ = await client.ask("/create_session", b" " * (MOST_JSON_BYTES + 1))
    assert status == 413
    status, answer = await client.ask("/forward_backward", forward_backward("s-1:train:0", 1, GOOD))
    assert (status, answer["param"]) == (400, "Content-Type")
    target = {"sampling_session_id": "s-1:sample:0", "cloned_sampler_id": 2**40}
    status, answer = await client.ask("/retrieve_futures", {"target": target})
    assert (status, answer["param"]) == (422, "target.cloned_sampler_id")
    # 1,000 bytes that decompress to a million. The memory limits count the bytes as they arrive, so a compressed body
    # must be refused.
    packed = gzip.compress(b" " * 1_000_000)
    status, answer = await client.ask("/asample", packed, headers={"Content-Encoding": "gzip"})
    assert (status, answer["param"]) == (400, "Content-Encoding")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[" * 50_000, b'{"request_id": "\xff"}', b"null", b'{"request_id": 1e999}']
)
async def test_malformed_json_is_refused(client: Client, text: bytes) -> None:
    status, answer = await client.ask("/retrieve_future", text)
    assert (status, answer["code"]) == (422, "invalid")


async def test_a_tenant_does_not_see_another_s_objects(client: Client) -> None:
    model_id, sampler_id = await client.model_id(), await client.sampler_id()
    _, asked = await client.sample(sampler_id)
    other = {"headers": {"X-API-Key": client.door.other_key}}
    adam = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
    statuses = [
        (await client.ask("/retrieve_future", {"request_id": asked["request_id"]}, **other))[0],
        (await client.ask("/cancel_future", {"request_id": asked["request_id"]}, **other))[0],
        (await client.ask("/get_info", {"model_id": model_id}, **other))[0],
        (await client.ask("/optim_step", adam, **other))[0],
        (await client.ask(f"/samplers/{sampler_id}", method="GET", **other))[0],
        (await client.ask(f"/training_runs/{model_id}", method="GET", **other))[0],
    ]
    assert set(statuses) <= {403, 404}
    assert (await client.ask("/training_runs", method="GET", **other))[1]["training_runs"] == []
    assert (await client.outcome(asked["request_id"]))[0] == 200


async def test_a_cancelled_sample_does_not_stay(client: Client, hub: TenantHub) -> None:
    sampler_id = await client.sampler_id()
    _, first = await client.sample(sampler_id)
    await client.outcome(first["request_id"])
    hub.starter.current.draws_go_on.clear()
    _, asked = await client.sample(sampler_id, seq_id=1)
    waiting = asyncio.create_task(client.outcome(asked["request_id"]))
    await asyncio.sleep(0.1)
    assert (await client.ask("/cancel_future", {"request_id": asked["request_id"]}))[0] == 200
    status, answer = await asyncio.wait_for(waiting, 10)
    assert status == 410 or "error" in answer


async def test_checked_samples_have_an_address_of_their_own(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = []
    sample = client.door.service.sample

    async def noted(*arguments: Any, wish: Any, **options: Any) -> Any:
        wishes.append(wish)
        return await sample(*arguments, wish=wish, **options)

    monkeypatch.setattr(type(client.door.service), "sample", lambda _self, *a, **o: noted(*a, **o))
    sampler_id = await client.sampler_id()
    await client.sample(sampler_id)
    checked = Client(client.door, client._session, prefix=wire.CHECKED_PREFIX)
    await checked.sample(sampler_id, seq_id=1)
    assert [wish.checked for wish in wishes] == [False, True]


async def test_exports_need_a_valid_signature(client: Client) -> None:
    model_id = await client.model_id()
    _, asked = await client.ask("/save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "out"})
    path = (await client.outcome(asked["request_id"]))[1]["path"]
    assert path == f"tinker://{model_id}/external_weights/out"
    address = f"/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
    _, answer = await client.ask(address, method="GET")
    (url,) = answer["urls"].values()
    wrong = (
        url.replace("adapter", "adapters"),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace("ada", "bob", 1),
    )
    async with aiohttp.ClientSession() as anyone:
        async with anyone.get(URL(url, encoded=True)) as file:
            assert file.status == 200 and len(await file.read()) > 64
        for one in wrong:
            async with anyone.get(URL(one, encoded=True)) as file:
                assert file.status == 403
    assert (await client.ask(address.rpartition("/")[0], method="DELETE"))[0] == 204
    async with aiohttp.ClientSession() as anyone, anyone.get(URL(url, encoded=True)) as file:
        assert file.status in (404, 410)


async def test_a_signed_url_ends_when_its_tenant_is_blocked(client: Client) -> None:
    model_id = await client.model_id()
    _, asked = await client.ask("/save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "out"})
    await client.outcome(asked["request_id"])
    address = f"/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
    (url,) = (await client.ask(address, method="GET"))[1]["urls"].values()
    access = client.door.wire.access
    assert isinstance(access, TenantAccess)
    async with aiohttp.ClientSession() as anyone:
        for blocked, status in ((frozenset({"ada"}), 403), (frozenset(), 200)):
            access.blocked = blocked
            async with anyone.get(URL(url, encoded=True)) as file:
                assert file.status == status


@pytest.mark.parametrize(
    ("kind", "submitted", "sampled", "retrieved"),
    [
        (RefusalKind.INVALID, 400, 400, 422),
        (RefusalKind.QUOTA_SPENT, 402, 402, 402),
        (RefusalKind.FORBIDDEN, 403, 403, 403),
        (RefusalKind.NOT_FOUND, 404, 404, 404),
        (RefusalKind.GONE, 410, 410, 410),
        (RefusalKind.TOO_LARGE, 413, 413, 413),
        (RefusalKind.TOO_MANY, 429, 429, 429),
        (RefusalKind.NOT_READY, 503, 429, 503),
    ],
)
async def test_each_refusal_has_its_status(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    kind: RefusalKind,
    submitted: int,
    sampled: int,
    retrieved: int,
) -> None:
    async def refuses(*_arguments: Any, **_options: Any) -> Pending:
        raise Refusal(kind, "No.", retry_after_s=3.0)

    monkeypatch.setattr(wire, "PAUSE_S", 0.0)
    for method in ("optim_step", "sample", "outcome", "finished_samples"):
        monkeypatch.setattr(type(client.door.service), method, refuses)
    step = {"model_id": "s-1:train:0", "seq_id": 1, "adam_params": {}}
    assert (await client.ask("/optim_step", step))[0] == submitted
    assert (await client.sample("s-1:sample:0"))[0] == sampled
    assert (await client.outcome("r"))[0] == retrieved
    assert (await client.ask("/retrieve_futures", {"target": {"sampling_session_id": "s"}}))[0] == retrieved


async def test_a_bug_is_answered_with_500_after_a_pause(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_arguments: Any, **_options: Any) -> Pending:
        raise ZeroDivisionError

    monkeypatch.setattr(wire, "PAUSE_S", 0.3)
    monkeypatch.setattr(type(client.door.service), "outcome", fails)
    began = time.monotonic()
    status, _ = await client.outcome("r")
    assert status == 500
    assert time.monotonic() - began >= 0.3, "the SDK asks again at once"
    assert "ZeroDivisionError" in caplog.text
