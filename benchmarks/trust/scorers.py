"""Completions that are written to kill who scores them: slow, deep, large, for every task in the box and one's own.

The scorers are the real ones, in the processes that a hub gives them (`echo_hub.scoring.pool`). The built-in model can
only write digits, so a completion is the number of a text in `TEXTS`, and of a task; `Told` looks up both. What is
looked for: every call is answered, within the limits of time and memory, and the honest one behind it is right.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.trust.protocol import Unnoticed
from benchmarks.trust.site import open_site
from benchmarks.trust.stranger import Stranger, completion
from echo_hub.config.file import load_config
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring.pool import ScorerDeath, ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.tasks.arithmetic import make_arithmetic
from echo_hub.tasks.base import Problem, Task
from echo_hub.tasks.environments.base import Ending, Environment
from echo_hub.tasks.registry import make_task
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.messages import ReceiptState

LENGTH: Final = 100_000
"""Characters: some 32,000 tokens."""
SCORED_WITHIN_S: Final = 3.0
RESTS_WITHIN_S: Final = 240.0
"""Two groups of completions have to kill a process each that takes seconds to start."""
RESTS_S: Final = 30.0
"""Who has room, and is given nothing for so long by a hub that has nobody else, rests."""
PROCESSES: Final = 2
_REPEATED: Final = (
    *("<answer>", "<answer></answer", "</answer>", "<answer>1</answer>", "(", "[", "{", '{"a":', "-", "+1", "1+", "9"),
    *("1 ", "a", " ", "\n", ",", "$", "$1$", "\\boxed{", "\\boxed{1}", "\\frac{1}{", "\\sqrt{", "{}", "1^", "2**", "!"),
    *("\\text{", "\\left(", "1/", "x", "x+", "١", "𝟗", "\u202e", "\u0000", "\\begin{matrix}", "1,", ".1", "and ", "|"),
)
TEXTS: Final = (
    *(one * (LENGTH // len(one)) for one in _REPEATED),
    *("(" * 5_000 + "1" + ")" * 5_000, "[" * 5_000 + "]" * 5_000, '{"a":' * 5_000 + "1" + "}" * 5_000),
    *("9**9**9**9", "$9^{9^{9^{9}}}$", "\\boxed{10^{10^{10^{10}}}}", "\\boxed{99999999!}", "1e999999999", "1/0"),
    *(
        "\\boxed{\\int_0^1 x^{x^{x^x}} dx}",
        "\\boxed{\\sum_{n=1}^{10^{9}} n!}",
        "\\boxed{[0,10^{100000}]}",
        "nan",
        "inf",
    ),
    *("\\boxed{(x+1)^{100000}}", "\\boxed{\\frac{" + "(x+y)^{99}" * 50 + "}{1}}", "0x" + "f" * 50_000, "", "\ud800"),
    "\\boxed{" + ",".join(map(str, range(20_000))) + "}",
)
"""Deadly for one scorer or another."""
FIRST: Final = 1_000
"""Numbers from here on are texts, so that all have as many digits; FIRST - 1 is the right answer."""
_BACKTRACKS: Final = re.compile(r"(a+)+$")


class _Careless:
    """A task of one's own that has not heard of strangers."""

    name = "python:careless"

    def sample(self, seed: int) -> Problem:
        return make_arithmetic({}).sample(seed)

    def score(self, problem: Problem, completion: str) -> float:
        match len(completion) % 5:
            case 0:
                return float(_BACKTRACKS.match("a" * 64 + "!") is not None)
            case 1:
                return self.score(problem, completion + completion[:5]) if completion else 0.0
            case 2:
                return float(len(completion * 10**9))
            case 3:
                os._exit(3)
        time.sleep(3_600)
        return 0.0


class Told:
    """Several tasks as one: the digits of a completion say which task scores which text. FIRST - 1 is right."""

    name = "told"

    def __init__(self, tasks: Sequence[Task | Environment]) -> None:
        self._tasks = tasks
        self._sums = make_arithmetic({})

    def sample(self, seed: int) -> Problem:
        return self._sums.sample(seed)

    def score(self, _problem: Problem, completion: str) -> float:
        number = int(completion or FIRST) - FIRST
        if number < 0:
            return 1.0
        task, text = self._tasks[number // len(TEXTS)], TEXTS[number % len(TEXTS)]
        if isinstance(task, Environment):
            response = task.respond(task.sample(1), [text])
            return response.reward if isinstance(response, Ending) else response.reward_if_cut
        return task.score(task.sample(1), text)


def make(options: Mapping[str, Any]) -> Told:
    """`options`: the `names` of the tasks; of one, its options."""
    names = options["names"]
    return Told([_Careless() if name == _Careless.name else make_task(name, options.get(name, {})) for name in names])


async def _attacked(
    scratch: Path, names: Sequence[str], options: Mapping[str, Any] | None = None, *, one_in: int = 1
) -> str:
    """Gives each of the tasks one in so many of the texts, others to the next task. Raises Unnoticed."""
    settings = {
        "task": {
            "name": f"python:{__name__}:make",
            "options": {"names": list(names), **(options or {})},
            "scorer_timeout_s": SCORED_WITHIN_S,
            "scorer_processes": PROCESSES,
        },
        "evaluation": {"problems": 1},
    }
    config, base = load_config(None, settings), resolve_base("builtin:tiny")
    codec = PromptCodec.load(base)
    problems = Problems.of_run(config, codec)
    found: Counter[str] = Counter()
    slowest, right = 0.0, codec.encode_prompt(str(FIRST - 1))
    async with ScoringPool.open(config, problems, base_dir=base, logs=scratch / "logs") as pool:
        await pool.call("respond", [(0, [right])] * PROCESSES)

        async def ask(number: int) -> None:
            nonlocal slowest
            async with free:
                began_at = time.monotonic()
                ids = codec.encode_prompt(str(FIRST + number))
                deadly, honest = await pool.call("respond", [(0, [ids]), (0, [right])])
                slowest = max(slowest, time.monotonic() - began_at)
            if honest != 1.0:
                raise Unnoticed(f"{TEXTS[number % len(TEXTS)][:40]!r} takes the honest one with it: {honest}")
            died, failed = isinstance(deadly, ScorerDeath), isinstance(deadly, ScorerError)
            found["ended" if died else "failed" if failed else "scored"] += 1

        free = asyncio.Semaphore(PROCESSES)
        numbers = range(len(names) * len(TEXTS))
        await asyncio.gather(*(ask(each) for each in numbers if (each + each // len(TEXTS)) % one_in == 0))
    logged = sum(path.stat().st_size for path in (scratch / "logs").glob("*"))
    if logged > 2**20:
        raise Unnoticed(f"{logged / 1e6:.1f} MB are in the scorers' logs")
    return f"{dict(found)}, the slowest with its start anew {slowest:.1f} s; {logged / 1e3:.0f} KB in the logs"


async def in_the_box(scratch: Path, _seed: int) -> str:
    """Every text to arithmetic, mathematics from files, and the game."""
    files = {"jsonl": {"path": str(_problems(scratch))}}
    return await _attacked(scratch, ("arithmetic", "jsonl", "environment:guess"), files)


def _problems(directory: Path) -> Path:
    file = directory / "problems.jsonl"
    directory.mkdir()
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    return file


async def reasoning_gym(scratch: Path, _seed: int) -> str:
    """Every dataset of reasoning-gym that can be a task gets some of the texts, and each text goes to many."""
    from reasoning_gym.factory import DATASETS

    names = []
    for name in sorted(DATASETS):
        with suppress(ConfigError):
            make_task(f"reasoning-gym:{name}", {})
            names.append(f"reasoning-gym:{name}")
    return await _attacked(scratch, names, one_in=10)


async def of_ones_own(scratch: Path, _seed: int) -> str:
    """A task of one's own that backtracks, recurses, allocates, ends its process, or sleeps."""
    return await _attacked(scratch, (_Careless.name,), one_in=6)


async def from_a_node(scratch: Path, seed: int) -> str:
    """A node whose every completion kills its scorer: it is given nothing more for a while, and the hub goes on."""
    own: dict[str, dict[str, Any]] = {
        "task": {
            "name": f"python:{__name__}:make",
            "options": {"names": [_Careless.name]},
            "scorer_timeout_s": SCORED_WITHIN_S,
        },
        "trust": {"verifier": "off"},  # What a stranger writes by hand was drawn by nobody.
    }
    with open_site(scratch, seed=seed, sections=own) as site, site.watched() as health:
        node = await Stranger(site.url).join()
        await node.report(16)
        dropped = 0
        try:
            async with asyncio.timeout(RESTS_WITHIN_S):
                while not node.ended:
                    try:
                        await node.until(lambda: node.leases or node.standby, within_s=RESTS_S)
                    except TimeoutError:
                        break
                    if node.standby is not None:
                        break
                    lease = await node.lease()
                    del node.leases[lease.lease_id]
                    deadly = [completion(lease, index, _digits(FIRST + 3)) for index in lease.indices]
                    for sent in deadly:
                        await node.say(sent)
                    for sent in deadly:
                        dropped += await node.outcome(sent) is ReceiptState.DROPPED
        except TimeoutError as error:
            raise Unnoticed(f"{dropped} scorers were killed, and it is still given work") from error
        finally:
            await node.close()
    stall = f"{health.stall_s:.2f} s at most"
    if not dropped:
        raise Unnoticed("it was given no work before any scorer was killed")
    told = "nothing" if node.standby is None else node.standby.reason
    return f"{dropped} killed their scorer, then it was given no work, and told {told}; /healthz took {stall}"


def _digits(number: int) -> list[int]:
    return [int(token) for token in PromptCodec.load(resolve_base("builtin:tiny")).encode_prompt(str(number))]


Attack = Callable[[Path, int], Awaitable[str]]
ATTACKS: Final[Mapping[str, Attack]] = {
    "deadly completions, tasks in the box": in_the_box,
    "deadly completions, reasoning-gym": reasoning_gym,
    "deadly completions, a task of one's own": of_ones_own,
    "deadly completions from a node": from_a_node,
}
"""By name."""
