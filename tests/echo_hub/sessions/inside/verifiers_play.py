"""Plays episodes of the demo environment, in the interpreter that has verifiers: python verifiers_play.py JOB

JOB is JSON: options, place, scenarios, and result: the file in which JSON tells what each scenario has shown. Those of
`meanwhile` are played first, while the scenario `late` waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from echo_hub.sessions.inside import verifiers_server
from echo_hub.sessions.inside.verifiers_episode import RunLost, Untrainable
from echo_hub.sessions.inside.verifiers_server import VerifiersServer, VerifiersSession
from echo_hub.sessions.inside.verifiers_strays import descendants

CALL = '<tool_call>\n{{"name": "demo_env_lookup", "arguments": {{"word": "{word}"}}}}\n</tool_call><|im_end|>'


class Play:
    """An environment server, and a policy that encodes texts as token ids with made-up log-probabilities."""

    def __init__(self, server: VerifiersServer, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def reply(self, text: str, finish_reason: str = "stop") -> dict[str, Any]:
        ids = self.ids(text)
        return {
            "text": text,
            "ids": ids,
            "logprobs": [-0.125 * (at + 1) for at in range(len(ids))],
            "finish_reason": finish_reason,
        }

    def call(self, word: str) -> dict[str, Any]:
        return self.reply(CALL.format(word=word))

    async def begun(self, seed: int) -> tuple[VerifiersSession, dict[str, Any], list[int]]:
        problem = await self.server.sample(seed)
        session = await self.server.open(problem, seed)
        opening = await session.reset()
        return session, problem, opening["ids"]

    def shown(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


async def with_tool(play: Play) -> dict[str, Any]:
    """Play two turns with a call of the tool. Also return the trace (record of the run) that verifiers has written."""
    session, problem, prompt = await play.begun(2)
    first, second = play.call("cups"), play.reply("3<|im_end|>")
    began = time.monotonic()
    observed = await session.step(first)
    step_s = time.monotonic() - began
    ending = await session.step(second)
    await session.close()
    added = observed["observation"]["ids"]
    lines = (Path(play.server._folder) / "traces.jsonl").read_text().splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    joined = {
        name: [one for node in traces[-1]["nodes"] for one in node[name]] for name in ("token_ids", "mask", "logprobs")
    }
    return {
        "prompt": prompt,
        "problem": problem,
        "prompt_text": play.shown(prompt),
        "first": first,
        "added": added,
        "added_text": play.shown(added),
        "second": second,
        "ending": ending,
        "trace": joined,
        "step_s": step_s,
    }


async def cut(play: Play) -> dict[str, Any]:
    """Cut the first turn at its token limit, then tell the episode that the context is full."""
    session, _, _ = await play.begun(0)
    observed = await session.step(play.call("apples"))
    assert "observation" in observed
    scored = await session.score()
    await session.close()
    return {"scored": scored}


async def closed(play: Play) -> dict[str, Any]:
    """Close the episode during a tool call whose server ignores SIGTERM."""
    before = set(descendants())
    session, _, _ = await play.begun(1)
    step = asyncio.create_task(session.step(play.call("sleep")))
    await asyncio.sleep(2.0)
    during = set(descendants()) - before
    began = time.monotonic()
    step.cancel()
    await session.close()
    took_s = time.monotonic() - began
    return {"during": len(during), "left": len((set(descendants()) - before) & during), "took_s": took_s}


async def branch(play: Play) -> dict[str, Any]:
    """Post a request with a changed history while a tool works, as an agent does that summarises its history."""
    from aiohttp import ClientSession

    session, _, prompt = await play.begun(1)
    step = asyncio.create_task(session.step(play.call("sleep")))
    await asyncio.sleep(0.5)
    (trace,) = session._run.episode.traces
    headers = {"X-Session-ID": trace, "X-Echo-Key": play.server._key}
    body = {"model": "policy", "token_ids": [*prompt, 5], "sampling_params": {}}
    async with ClientSession() as client:
        url = f"{play.server._url}/inference/v1/generate"
        async with client.post(url, json=body, headers=headers) as answer:
            told = [answer.status, await answer.json()]
        async with client.post(url, json=body, headers={"X-Session-ID": trace}) as answer:
            stranger = answer.status
    try:
        await step
        raised = ""
    except (RunLost, Untrainable) as error:
        raised = f"{error.code}: {error}"
    await session.close()
    return {"told": told, "stranger": stranger, "raised": raised}


async def posted_twice(play: Play) -> dict[str, Any]:
    """Post a copy of the agent's request before its answer, and a third copy afterwards."""
    from aiohttp import ClientSession

    session, _, prompt = await play.begun(4)
    (trace,) = session._run.episode.traces
    headers = {"X-Session-ID": trace, "X-Echo-Key": play.server._key}
    body = {"model": "policy", "token_ids": prompt, "sampling_params": {}}

    async def post() -> Any:
        url = f"{play.server._url}/inference/v1/generate"
        async with ClientSession() as client, client.post(url, json=body, headers=headers) as answer:
            return await answer.json()

    early = asyncio.create_task(post())
    await asyncio.sleep(0.2)
    ending = await session.step(play.reply("5<|im_end|>"))
    answers = [await early, await post()]
    await session.close()
    return {"answers": answers, "ending": ending, "sent": play.reply("5<|im_end|>")["ids"]}


async def killed(play: Play) -> dict[str, Any]:
    """Kill the worker process during a turn. The next episode must get a new worker, and the old worker's programs must
    be gone."""
    session, problem, _ = await play.begun(5)
    before = set(descendants())
    os.kill(session._run.worker.pid, signal.SIGKILL)
    try:
        await session.step(play.call("figs"))
        raised = ""
    except (RunLost, Untrainable) as error:
        raised = f"{error.code}: {error}"
    await session.close()
    again = await play.server.open(problem, 5)
    opening = await again.reset()
    ending = await again.step(play.reply("6<|im_end|>"))
    await again.close()
    left = before & set(descendants())
    return {"raised": raised, "same": opening["ids"] == problem["prompt_ids"], "ending": ending, "left": len(left)}


async def late(play: Play, meanwhile: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Answer a turn only after the time for which verifiers tries to reach a silent engine."""
    session, _, _ = await play.begun(0)
    began = time.monotonic()
    await meanwhile()
    await asyncio.sleep(began + 70.0 - time.monotonic())
    ending = await session.step(play.reply("1<|im_end|>"))
    await session.close()
    return {"ending": ending}


async def example(play: Play) -> list[str]:
    """Return the texts of an episode for "cups": the prompt, the call of the tool, and the tool's answer."""
    session = await play.server._begin(2)
    prompt = (await session.reset())["ids"]
    call = play.call("cups")
    observed = await session.step(call)
    await session.close()
    return [play.shown(ids) for ids in (prompt, call["ids"], observed["observation"]["ids"])]


SCENARIOS: dict[str, Callable[[Play], Awaitable[Any]]] = {
    "with_tool": with_tool,
    "cut": cut,
    "closed": closed,
    "branch": branch,
    "posted_twice": posted_twice,
    "killed": killed,
    "example": example,
}


async def main(job: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    server = await VerifiersServer.start(job["options"], job["place"])
    told: dict[str, Any] = {"start_s": time.monotonic() - began}
    play = Play(server, Tokenizer.from_file(f"{job['place']['base']}/tokenizer.json"))

    async def played(names: list[str]) -> None:
        for name in names:
            told[name] = await SCENARIOS[name](play)

    try:
        if job["meanwhile"]:
            told["late"] = await late(play, lambda: played(job["meanwhile"]))
        await played(job["scenarios"])
    finally:
        began = time.monotonic()
        await server.aclose()
    told["stop_s"] = time.monotonic() - began
    told["left"] = len(descendants())
    return told


if __name__ == "__main__":
    verifiers_server.log.setLevel("WARNING")
    job = json.loads(sys.argv[1])
    os.chdir(job["place"]["directory"])
    result = asyncio.run(main(job))
    Path(job["result"]).write_text(json.dumps(result))
