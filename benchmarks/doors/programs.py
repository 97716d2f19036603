"""Programs of tenants, written for the tinker SDK. The Python of `make doors` runs this file, which imports nothing of
Echo.

    python programs.py NAME ARGUMENT...

The environment variables TINKER_BASE_URL and TINKER_API_KEY must be set. Each program prints its findings as a last
line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

MODEL = "Qwen/Qwen3-8B"
ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-8)
LOOK_S = 0.05


def prompt(number: int, length: int = 12) -> Any:
    """Return a prompt of `length` tokens that depends on `number` alone, so that it can be sent again."""
    rng = np.random.default_rng(number)
    return types.ModelInput.from_ints(rng.integers(3, 90, length).tolist())


def datum(number: int, length: int) -> Any:
    tokens = np.random.default_rng(number).integers(3, 90, length + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.from_numpy(tokens[1:])),
            "weights": types.TensorData.from_torch(torch.ones(length)),
        },
    )


def requests(count: str) -> dict[str, Any]:
    """Ask for samples, one at a time. Return the seconds that each took."""
    sampler = tinker.ServiceClient().create_sampling_client(base_model=MODEL)
    seconds = []
    for number in range(int(count)):
        began = time.monotonic()
        sampler.sample(prompt(number), 1, types.SamplingParams(max_tokens=48, seed=number)).result()
        seconds.append(time.monotonic() - began)
    return {"seconds": seconds}


def work(rounds: str, ready: str, go: str) -> dict[str, Any]:
    """Wait for the file `go`, then train and sample in each round. Return the seconds of all rounds together."""
    model = tinker.ServiceClient().create_lora_training_client(MODEL, rank=8, seed=5)
    model.get_info()
    Path(ready).touch()
    while not Path(go).exists():
        time.sleep(LOOK_S)
    began = time.monotonic()
    for number in range(int(rounds)):
        passed = model.forward_backward([datum(8 * number + index, 128) for index in range(8)], "cross_entropy")
        step = model.optim_step(ADAM)
        sampler = model.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=24, seed=number)
        samples = [sampler.sample(prompt(4 * number + index), 4, params) for index in range(4)]
        for future in (passed, step, *samples):
            future.result()
    return {"seconds": time.monotonic() - began}


def held(count: str) -> dict[str, Any]:
    """Ask for many samples at once. Return the number of samples received, and the seconds until the last one."""
    sampler = tinker.ServiceClient().create_sampling_client(base_model=MODEL)

    async def ask() -> int:
        params = types.SamplingParams(max_tokens=8)
        answers = await asyncio.gather(*(sampler.sample_async(prompt(n), 1, params) for n in range(int(count))))
        return len({answer.sequences[0].sequence_id for answer in answers})

    began = time.monotonic()
    return {"samples": asyncio.run(ask()), "seconds": time.monotonic() - began}


class Endurance:
    """A training client and a sampling client. Lost requests are counted, and answers are kept."""

    def __init__(self) -> None:
        service = tinker.ServiceClient()
        self.model = service.create_lora_training_client(MODEL, rank=8, seed=5)
        self.sampler = service.create_sampling_client(base_model=MODEL)
        self.asked = 0
        self.lost = 0
        self.answers: list[Any] = []

    def round(self, number: int) -> None:
        """Queue a forward-backward pass, an optimizer step and samples; wait for all of them."""
        futures = [
            self.model.forward_backward([datum(number, 48)], "cross_entropy"),
            self.model.optim_step(ADAM),
            *(
                self.sampler.sample(prompt(number), 2, types.SamplingParams(max_tokens=8, seed=4 * number + index))
                for index in range(3)
            ),
        ]
        answers = []
        for future in futures:
            self.asked += 1
            try:
                answers.append(future.result())
            except Exception as error:  # noqa: BLE001 - Any failure is a lost request, and is counted.
                print(f"lost: {error!r}", flush=True)
                self.lost += 1
        passes = [one for one in answers if hasattr(one, "loss_fn_outputs")]
        samples = [one for one in answers if hasattr(one, "sequences")]
        logprobs = [np.asarray(one["logprobs"].tolist()).tolist() for each in passes for one in each.loss_fn_outputs]
        self.answers.append([logprobs, [sequence.tokens for each in samples for sequence in each.sequences]])


def endure(progress: str, stop: str) -> dict[str, Any]:
    """Train and sample until the file `stop` exists. Then repeat all rounds undisturbed, and count the rounds that
    differ.
    """
    disturbed, number = Endurance(), 0
    while not Path(stop).exists():
        disturbed.round(number)
        number += 1
        Path(progress).write_text(str(number))
    calm = Endurance()
    for again in range(number):
        calm.round(again)
    changed = sum(one != other for one, other in zip(disturbed.answers, calm.answers, strict=True))
    return {"rounds": number, "asked": disturbed.asked, "lost": disturbed.lost, "changed": changed}


if __name__ == "__main__":
    _, name, *arguments = sys.argv
    programs: dict[str, Callable[..., dict[str, Any]]] = {
        "requests": requests,
        "work": work,
        "held": held,
        "endure": endure,
    }
    print(json.dumps(programs[name](*arguments)))
    # The SDK's threads may still wait for a server that is gone.
    sys.stdout.flush()
    os._exit(0)
