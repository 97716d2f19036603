"""All episodes of one verifiers environment, in the interpreter that has verifiers.

verifiers runs the agent itself and asks for completions over HTTP. This module turns that around:

    hub      open, step, score, close  →  VerifiersSession
    agent    POST /inference/v1/generate on loopback, answered by the next step
    worker   verifiers' own env server, one `run` request an episode (`verifiers_worker`)

Token ids are taken as verifiers gives them. Requests are told apart by the trace's id, which verifiers sends in the
header X-Session-ID and, before, in the first change of the trace.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from echo_hub.sessions.inside.verifiers_episode import (
    ContextFull,
    DrawRules,
    RunLost,
    TraceFacts,
    Untrainable,
    VerifiersEpisode,
)
from echo_hub.sessions.inside.verifiers_strays import adopt_orphans, end_programs
from echo_hub.sessions.inside.verifiers_worker import EnvWorker, RunFailed, WorkerGone

log = logging.getLogger(__name__)

MODEL: Final = "policy"
"""Name under which verifiers knows the trained policy."""
KEY_HEADER: Final = "X-Echo-Key"
SESSION_HEADER: Final = "X-Session-ID"
EPISODES_A_WORKER: Final = 128
TRACE_S: Final = 30.0
"""Longest time in seconds to wait until verifiers announces the trace to which a request belongs."""
CLOSE_S: Final = 4.0
"""Seconds that verifiers has to end an episode's programs. After that, the hub kills them."""

TRACES_BYTES: Final = 2**25


class NoEnvServer(Exception):
    """No env server (verifiers' process that runs agents) can be started now."""

    code = "environment_away"


class UnusableEnvironment(Exception):
    """The environment cannot be used in this run: training on any of its episodes is impossible."""

    code = "config"


class _Run:
    """One run in an env server, with its episode."""

    def __init__(self, server: VerifiersServer, worker: EnvWorker, episode: VerifiersEpisode) -> None:
        self._server = server
        self.worker = worker
        self.episode = episode
        self.id = uuid.uuid4().hex
        self.task: asyncio.Task[None]

    def changed(self, delta: dict[str, Any]) -> None:
        """Handle one change of a trace. The first change names the agent ("seat") that the trace belongs to."""
        if "open" in delta:
            seat = (delta.get("set") or {}).get("agent") or {}
            name, is_trained = seat.get("name", "agent"), seat.get("trainable", True)
            self.episode.traced(delta["trace"], seat=name, is_trained=is_trained)
            self._server.traced(delta["trace"], self.episode)


class VerifiersSession:
    """One episode, with the methods that the hub's sessions call."""

    def __init__(self, server: VerifiersServer, run: _Run) -> None:
        self._server = server
        self._run = run

    async def reset(self) -> dict[str, Any]:
        """Return the first prompt's token ids."""
        news = await self._run.episode.next()
        if isinstance(news, dict):
            raise RunLost("The run has ended before it asked for a turn.")
        return {"text": "", "ids": news}

    async def step(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Give the policy's turn to the agent; return the ids that follow, or the ending."""
        self._server.allow_cpu(self._run.episode)
        self._run.episode.answer(reply["ids"], reply["logprobs"], reply["finish_reason"])
        news = await self._run.episode.next()
        return {"ending": news} if isinstance(news, dict) else {"observation": {"text": "", "ids": news}}

    async def score(self) -> dict[str, Any]:
        """End the episode, because the context is full. An agent that cannot handle this earns the lowest reward."""
        self._run.episode.cut()
        try:
            news = await self._run.episode.next()
        except RunLost as error:
            log.warning("an agent failed when its context was full: %s", error)
            news = {"reward": self._server.lowest_reward, "components": {}}
        return {"ending": news}

    async def close(self) -> None:
        await self._server.end(self._run)


class VerifiersServer:
    """The environment: its tasks, its workers, and the HTTP server that agents ask. Create it with `start`."""

    def __init__(self, options: Mapping[str, Any], place: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._options = options
        self._place = place
        self._config = config
        self._folder = Path(place["directory"])
        self._rules = DrawRules(
            stop_ids=frozenset(place["stop_ids"]),
            max_tokens=place["max_tokens"],
            temperature=place["temperature"],
            vocabulary=place.get("vocabulary") or 2**31,
        )
        self._cage: Any = sys.modules.get("session_cage")
        """The cage in which this process runs; None if there is none."""
        self._key = secrets.token_urlsafe(24)
        self._workers: list[EnvWorker] = []
        self._starting = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._traces: dict[str, asyncio.Future[VerifiersEpisode]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)
        self._rows: list[dict[str, Any]] = []
        self._url = ""
        self._runner: Any = None
        self.lowest_reward = float(options["bounds"][0])

    @classmethod
    async def start(cls, options: Mapping[str, Any], place: Mapping[str, Any]) -> VerifiersServer:
        """Read the tasks and start the first worker. `options` are those of
        `echo_hub.sessions.adapters.verifiers.VerifiersOptions`."""
        from verifiers.v1.serve import env_config_data
        from verifiers.v1.utils.loaders import load_taskset

        if not place["base"]:
            raise ValueError("A verifiers environment needs a run: its prompts are token ids of the run's base model.")
        adopt_orphans()
        config = chosen_config(place["task"].partition(":")[2], options)
        server = cls(options, place, env_config_data(config))
        await server._listen()
        first = asyncio.create_task(server._new_worker())
        try:
            tasks = itertools.islice(load_taskset(config.taskset), options["rows"])
            server._rows = await asyncio.to_thread(lambda: [task.data.model_dump(mode="json") for task in tasks])
            if not server._rows:
                raise ValueError(f"The task {place['task']} has no problems.")
            await first
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await server.aclose()
            raise
        return server

    async def _listen(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def sample(self, seed: int) -> dict[str, Any]:
        """Return the task of a seed. Starts a run once to find the first prompt with which the agent asks."""
        row = seed % len(self._rows)
        if row not in self._prompts:
            session = await self._begin(row)
            try:
                self._prompts[row] = (await session.reset())["ids"]
            except Untrainable as error:
                raise UnusableEnvironment(str(error)) from error
            finally:
                await session.close()
        data = self._rows[row]
        metadata = {"row": row, "answer": data.get("answer")}
        return {"prompt": prompt_text(data), "metadata": metadata, "prompt_ids": self._prompts[row]}

    async def open(self, problem: Mapping[str, Any], seed: int) -> VerifiersSession:
        """Begin an episode of a problem."""
        return await self._begin(int(problem["metadata"]["row"]))

    async def aclose(self) -> None:
        """End all workers and their programs."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
        end_programs([str(self._folder)])
        if self._runner is not None:
            await self._runner.cleanup()

    async def _begin(self, row: int) -> VerifiersSession:
        worker = await self._worker()
        run = _Run(self, worker, VerifiersEpisode(self._rules))
        worker.load += 1
        run.task = asyncio.create_task(self._play(run, self._rows[row]))
        return VerifiersSession(self, run)

    def allow_cpu(self, episode: VerifiersEpisode) -> None:
        """Give the programs of an episode the processor time of one more step. The cage limits it."""
        if self._cage is not None:
            for trace in episode.traces:
                self._cage.allow_cpu(trace)

    def _with_cause(self, text: str, episode: VerifiersEpisode) -> str:
        """Return the text. If the cage has killed a program of the episode at a limit, the limit's name comes first."""
        causes = [] if self._cage is None else [self._cage.cause_of(trace) for trace in episode.traces]
        return ": ".join([*(cause for cause in causes if cause), text])

    async def _play(self, run: _Run, row: Mapping[str, Any]) -> None:
        try:
            record = await run.worker.run(run.id, self._request(row), run)
            if self._options["save_traces"]:
                async with self._saving:
                    await asyncio.to_thread(self._save, record)
            facts = trace_facts(record)
            if facts.error:
                run.episode.failed(self._with_cause(facts.error, run.episode))
            else:
                run.episode.finished(facts)
        except (RunFailed, WorkerGone) as error:
            run.episode.failed(self._with_cause(str(error), run.episode))
        except Exception as error:
            log.exception("a run's record cannot be read")
            run.episode.failed(f"The run's record cannot be read: {error!r}")
        finally:
            run.worker.load -= 1

    def _request(self, row: Mapping[str, Any]) -> dict[str, Any]:
        renderer = self._options["renderer"]
        client = {
            "type": "train",
            "base_url": f"{self._url}/v1",
            "api_key_var": "ECHO_NO_KEY",
            "headers": {KEY_HEADER: self._key},
            "renderer": None if renderer == "auto" else {"name": renderer} if isinstance(renderer, str) else renderer,
            "renderer_model_name": self._place["base"],
        }
        sampling = {"temperature": self._rules.temperature, "max_tokens": self._rules.max_tokens}
        return {"task_data": dict(row), "client": client, "model": MODEL, "sampling": sampling}

    def traced(self, trace: str, episode: VerifiersEpisode) -> None:
        """Note to which episode a trace belongs."""
        future = self._trace(trace)
        if not future.done():
            future.set_result(episode)

    def _trace(self, trace: str) -> asyncio.Future[VerifiersEpisode]:
        if trace not in self._traces:
            self._traces[trace] = asyncio.get_running_loop().create_future()
        return self._traces[trace]

    async def _models(self, _request: Any) -> Any:
        from aiohttp import web

        card = {"id": MODEL, "object": "model", "max_model_len": self._most_prompt_tokens}
        return web.json_response({"object": "list", "data": [card]})

    @property
    def _most_prompt_tokens(self) -> int:
        """Largest number of tokens of a first prompt. Behind the prompt, a whole completion must fit, as in all
        tasks."""
        most: int = self._place["context_tokens"] - self._rules.max_tokens
        return most

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        if not secrets.compare_digest(request.headers.get(KEY_HEADER, ""), self._key):
            return web.json_response({"error": {"message": "This key is not valid."}}, status=403)
        trace = request.headers.get(SESSION_HEADER, "")
        try:
            body = await request.json()
            episode = await asyncio.wait_for(asyncio.shield(self._trace(trace)), TRACE_S)
            return web.json_response(await episode.asked(body))
        except TimeoutError:
            self._traces.pop(trace, None)
            text, code = f"No episode has the trace {trace!r}.", "unknown_trace"
        except ContextFull:
            text, code = f"The maximum context length is {self._place['context_tokens']} tokens.", "context_full"
        except (Untrainable, json.JSONDecodeError) as error:
            text, code = str(error), "refused"
        return web.json_response({"error": {"message": text, "code": code}}, status=400)

    async def _worker(self) -> EnvWorker:
        """Return the worker for the next episode. If all workers are full or dead, start a new worker."""
        async with self._starting:
            ended = [worker for worker in self._workers if worker.gone]
            self._workers = [worker for worker in self._workers if not worker.gone]
            for worker in ended:
                log.warning("a worker has ended: %s", worker.gone)
                await worker.close()
                end_programs([self._home(worker)], but=self._pids)
            free = next((worker for worker in self._workers if worker.load < EPISODES_A_WORKER), None)
            if free is None and len(self._workers) < self._options["workers"]:
                try:
                    return await self._new_worker()
                except WorkerGone as error:
                    raise NoEnvServer(f"{error} Its log says why.") from error
            return free or min(self._workers, key=lambda worker: worker.load)

    async def _new_worker(self) -> EnvWorker:
        worker = await EnvWorker.start(f"worker-{next(self._numbers)}", self._config, self._folder)
        self._workers.append(worker)
        return worker

    @property
    def _pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def _home(self, worker: EnvWorker) -> str:
        return str(self._folder / worker.name)

    async def end(self, run: _Run) -> None:
        """End a run and all its programs, in little more than `CLOSE_S` seconds."""
        if not run.task.done():
            await run.worker.cancel(run.id)
            await asyncio.wait([run.task], timeout=CLOSE_S)
        run.episode.close()
        for trace in run.episode.traces:
            self._traces.pop(trace, None)
        left = end_programs(run.episode.traces, but=self._pids) if run.episode.traces else []
        if not run.worker.load:
            left += end_programs([self._home(run.worker)], but=self._pids, orphans_only=True)
        if left:
            log.warning("killed programs that an episode had left: %s", left)

    def _save(self, record: Any) -> None:
        """Append a record to traces.jsonl. A file above `TRACES_BYTES` is renamed first: the cage limits its size."""
        file = self._folder / "traces.jsonl"
        try:
            if file.exists() and file.stat().st_size > TRACES_BYTES:
                file.replace(self._folder / "traces.old.jsonl")
            with file.open("a") as traces:
                traces.write(json.dumps(record.to_record(float_decimals=None)) + "\n")
        except OSError as error:  # A record that cannot be saved does not cost the episode.
            log.warning("the record of an episode was not saved: %s", error)


def chosen_config(taskset: str, options: Mapping[str, Any]) -> Any:
    """Return verifiers' section [env] for a run: the section in the options, changed so that agents run on this
    machine."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        harness_config_type,
        resolve_env_config,
    )

    given = json.loads(json.dumps(options["env"]))
    given["taskset"] = {**given.get("taskset", {}), "id": taskset}
    kind = env_config_type(taskset, given.get("id", ""))
    for name, field in kind.model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        seat = given.setdefault(name, {})
        # verifiers' default is a paid sandbox of one provider.
        seat.setdefault("runtime", {"type": "subprocess"})
        if options["max_turns"]:
            seat.setdefault("max_turns", options["max_turns"])
        if "harness" not in seat and field.default.harness is None and default_harness_id(taskset) == "bash":
            seat["harness"] = {"id": options["harness"]}
        harness = seat.get("harness")
        # An agent that summarises its history would begin a second branch of its trace, and such episodes are refused.
        if harness and "compaction" in harness_config_type(harness.get("id", "bash")).model_fields:
            harness.setdefault("compaction", None)
    return resolve_env_config(given)


def prompt_text(data: Mapping[str, Any]) -> str:
    """Return a task's prompt as readable text."""
    prompt = data.get("prompt") or ""
    if not isinstance(prompt, str):
        parts = (message.get("content") or "" for message in prompt)
        prompt = "\n\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
    return "\n\n".join(part for part in (data.get("system_prompt"), prompt) if part)


def trace_facts(record: Any) -> TraceFacts:
    """Return the tokens, rewards and error in verifiers' record of an episode."""
    if record.errors:
        return TraceFacts(error=f"{record.errors[-1].type}: {record.errors[-1].message}")
    trained: Sequence[Any] = [trace for trace in record.traces if trace.agent is None or trace.agent.trainable]
    if len(trained) != 1:
        return TraceFacts(error=f"The episode has {len(trained)} traces of trained seats, not one.")
    trace = trained[0]
    failures = [call.error for call in trace.calls if call.error is not None]
    if not trace.ok or not trace.num_turns:
        error = failures[-1] if failures else trace.last_error
        why = f"{error.type}: {error.message}" if error else f"it stopped with {trace.stop_condition}"
        return TraceFacts(error=f"The agent's run has failed: {why}")
    if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
        return TraceFacts(error=f"The rewards {', '.join(unscored)} were not computed.")
    branches = trace.branches
    return TraceFacts(
        branches=len(branches),
        ids=branches[0].token_ids,
        mask=branches[0].sampled_mask,
        logprobs=branches[0].logprobs,
        reward=trace.reward,
        rewards={name: reward.score for name, reward in trace.rewards.items()},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
    )


make = VerifiersServer.start
