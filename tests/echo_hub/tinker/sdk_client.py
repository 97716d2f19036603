"""Programs that use the tinker SDK as its users do. Run by the interpreter of build/doors, with TINKER_BASE_URL and
TINKER_API_KEY set. Each prints what it saw as one line of JSON.

    python sdk_client.py NAME...
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

MODEL = "Qwen/Qwen3-8B"
PROMPT = [5, 6, 7]


def datum(*tokens: int, weight: float = 1.0) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor([*tokens[1:], 3])),
            "weights": types.TensorData.from_torch(torch.full((len(tokens),), weight)),
        },
    )


def logprobs_of(result: Any) -> list[list[float]]:
    return [np.asarray(one["logprobs"].tolist()).tolist() for one in result.loss_fn_outputs]


def new_model(service: Any) -> Any:
    return service.create_lora_training_client(MODEL, rank=8, seed=5, user_metadata={"renderer_name": "qwen3"})


def training() -> dict[str, Any]:
    """Train three steps without waiting for each to finish, and save each kind of weights."""
    service = tinker.ServiceClient()
    offered = service.get_server_capabilities().supported_models
    model = new_model(service)
    info = model.get_info()
    adam = types.AdamParams(learning_rate=1e-3, eps=1e-8)
    queued = []
    for _ in range(3):
        queued.append((model.forward_backward([datum(5, 6, 7), datum(8, 9)], "cross_entropy"), model.optim_step(adam)))
    passes, steps = zip(*((one.result(), step.result()) for one, step in queued), strict=True)
    forward = model.forward([datum(5, 6, 7)], "cross_entropy").result()
    saved = model.save_state("first", ttl_seconds=604_800).result().path
    named = model.save_weights_for_sampler("first").result().path
    service.close("success").result()
    return {
        "offered": [[one.model_name, one.trainable] for one in offered],
        "info": [info.model_data.model_name, info.model_data.tokenizer_id, info.lora_rank],
        "losses": [one.metrics["loss:sum"] for one in passes],
        "logprobs": [logprobs_of(one) for one in passes],
        "forward": logprobs_of(forward),
        "metrics": [dict(step.metrics or {}) for step in steps],
        "paths": [saved, named],
    }


def resuming() -> dict[str, Any]:
    """Load weights with and without the optimizer. List, keep and delete checkpoints."""
    service = tinker.ServiceClient()
    rest = service.create_rest_client()
    model = new_model(service)
    adam = types.AdamParams(learning_rate=1e-3, eps=1e-8)

    def step(one: Any) -> list[float]:
        result = one.forward_backward([datum(5, 6, 7)], "cross_entropy").result()
        one.optim_step(adam).result()
        return logprobs_of(result)[0]

    step(model)
    path = model.save_state("state").result().path
    weights = rest.get_weights_info_by_tinker_path(path).result()
    second, third = step(model), step(model)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    again = [step(resumed), step(resumed)]
    fresh = service.create_training_client_from_state(path)
    without = [step(fresh), step(fresh)]
    runs = rest.list_training_runs(limit=10).result()
    run = rest.get_training_run_by_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7_200).result()
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_user_checkpoints().result().checkpoints
    return {
        "weights": [weights.base_model, weights.lora_rank, weights.train_unembed],
        "resumed": [second, third] == again,
        "without": second == without[0],
        "runs": len(runs.training_runs),
        "run": [run.training_run_id, run.base_model, run.user_metadata, run.last_checkpoint.tinker_path == path],
        "listed": [[one.checkpoint_type, one.tinker_path == path, one.expires_at is not None] for one in listed],
        "left": [one.tinker_path for one in left],
    }


def exporting() -> dict[str, Any]:
    """Download external weights by signed URLs: plain, and encrypted to a key of the client."""
    import pyrage

    service = tinker.ServiceClient()
    rest = service.create_rest_client()
    model = new_model(service)
    key = pyrage.x25519.Identity.generate()
    plain = model.save_weights_external("plain").result().path
    secret = model.save_weights_external("secret", age_encryption_recipients=[str(key.to_public())]).result().path

    def files(path: str) -> dict[str, bytes]:
        urls = rest.get_external_weights_urls(path).result().urls
        return {name: urllib.request.urlopen(url).read() for name, url in urls.items()}

    open_files, closed_files = files(plain), files(secret)
    opened = {name.removesuffix(".age"): pyrage.decrypt(data, [key]) for name, data in closed_files.items()}
    return {"names": sorted(open_files), "closed": sorted(closed_files), "equal": opened == open_files}


def downloading() -> dict[str, Any]:
    """Let tinker-cookbook download weights after some steps: of a training checkpoint, which it first saves as
    encrypted external weights, and of external weights. Compute log-probabilities with the same weights."""
    from tinker_cookbook import weights

    service = tinker.ServiceClient()
    model = new_model(service)
    for _ in range(4):
        model.forward_backward([datum(5, 6, 7), datum(8, 9)], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=2e-2, eps=1e-8)).result()
    paths = [model.save_state("final").result().path, model.save_weights_external("final").result().path]
    folders = [weights.download(tinker_path=path, output_dir=f"downloaded-{kind}") for kind, path in enumerate(paths)]
    prompt = [5, 6, 7, 8, 9, 4, 3]
    computed = model.save_weights_and_get_sampling_client().compute_logprobs(types.ModelInput.from_ints(prompt))
    left = service.create_rest_client().list_user_checkpoints().result().checkpoints
    return {
        "folders": [str(Path(folder).resolve()) for folder in folders],
        "prompt": prompt,
        "computed": computed.result()[1:],
        "left": [one.tinker_path for one in left],
    }


def sampling() -> dict[str, Any]:
    """Draw with the base, with saved weights and with a pickled sampler; compute a prompt's log-probabilities."""
    service = tinker.ServiceClient()
    base = service.create_sampling_client(base_model=MODEL)
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5]), types.EncodedTextChunk(tokens=[6, 7])])
    params = types.SamplingParams(max_tokens=6, seed=11, temperature=0.7)
    three = base.sample(prompt, num_samples=3, sampling_params=params).result()
    again = base.sample(prompt, num_samples=3, sampling_params=params).result()
    copy = pickle.loads(pickle.dumps(base))
    by_copy = copy.sample(prompt, num_samples=3, sampling_params=params).result()
    model = new_model(service)
    tuned = model.save_weights_and_get_sampling_client()
    own = tuned.sample(prompt, num_samples=1, sampling_params=params, include_prompt_logprobs=True).result()
    return {
        "tokens": [one.tokens for one in three.sequences],
        "repeats": [one.tokens for one in again.sequences] == [one.tokens for one in three.sequences],
        "copied": [one.tokens for one in by_copy.sequences] == [one.tokens for one in three.sequences],
        "ids": len({one.sequence_id for answer in (three, again, by_copy) for one in answer.sequences}),
        "lengths": [[len(one.tokens), len(one.logprobs)] for one in three.sequences],
        "own": [len(own.sequences), len(own.prompt_logprobs), own.prompt_logprobs[0]],
        "computed": base.compute_logprobs(prompt).result()[0],
    }


COPIES = (
    "import pickle; sampler = pickle.loads(given)",
    "import tinker; sampler = tinker.SamplingClient.from_sampler_handle(given.decode())",
)
"""Programs for other processes, which get a sampler as a pickled copy, or by its handle."""
DRAW = """
import json, os
from tinker import types
params = types.SamplingParams(max_tokens=6, seed=11)
found = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, params).result().sequences
print(json.dumps([[one.tokens for one in found], [one.sequence_id for one in found]]), flush=True)
os._exit(0)
"""


def processes() -> dict[str, Any]:
    """Draw samples in three processes at once: here with a sampler, in the second with a pickled copy of the sampler,
    and in the third with a sampler made from its handle."""
    sampler = new_model(tinker.ServiceClient()).save_weights_and_get_sampling_client()
    started = []
    for how, given in zip(COPIES, (pickle.dumps(sampler), sampler.get_sampler_handle().encode()), strict=True):
        command = [sys.executable, "-c", f"import sys; given = sys.stdin.buffer.read(); {how}\n{DRAW}"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(given)
        child.stdin.close()
        started.append(child)
    params = types.SamplingParams(max_tokens=6, seed=11)
    own = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params).result().sequences
    tokens, ids = [[one.tokens for one in own]], [one.sequence_id for one in own]
    for child in started:
        assert child.stdout is not None
        drawn, named = json.loads(child.stdout.read().splitlines()[-1])
        child.wait()
        tokens.append(drawn)
        ids += named
    return {"equal": all(one == tokens[0] for one in tokens), "ids": len(set(ids))}


def wait_until(file: Path, *, exists: bool) -> None:
    while file.exists() != exists:
        time.sleep(0.02)


def cancelling() -> dict[str, Any]:
    """Cancel a sample while the hub draws it. The file HELD exists as long as the hub draws."""
    held = Path(os.environ["HELD"])
    base = tinker.ServiceClient().create_sampling_client(base_model=MODEL)

    async def ask() -> dict[str, Any]:
        params = types.SamplingParams(max_tokens=4)
        waiting = asyncio.ensure_future(base.sample_async(types.ModelInput.from_ints([5, 668]), 1, params))
        await asyncio.to_thread(wait_until, held, exists=True)
        waiting.cancel()
        ended = (await asyncio.gather(waiting, return_exceptions=True))[0]
        await asyncio.to_thread(wait_until, held, exists=False)
        after = await base.sample_async(types.ModelInput.from_ints(PROMPT), 1, params)
        return {"ended": type(ended).__name__, "after": len(after.sequences[0].tokens)}

    return asyncio.run(ask())


def many() -> dict[str, Any]:
    """Run a pass over 2,500 data, and draw 200 samples at once."""
    service = tinker.ServiceClient()
    model = new_model(service)
    data = [datum(1 + index % 40, 5) for index in range(2_500)]
    result = model.forward_backward(data, "cross_entropy").result()
    after = model.optim_step(types.AdamParams()).result()
    base = service.create_sampling_client(base_model=MODEL)
    number = int(os.environ.get("NUM_SAMPLES", "200"))

    async def ask() -> int:
        prompts = [types.ModelInput.from_ints([1 + index % 40]) for index in range(number)]
        params = types.SamplingParams(max_tokens=4)
        answers = await asyncio.gather(*(base.sample_async(one, 1, params) for one in prompts))
        return len({one.sequences[0].sequence_id for one in answers})

    return {
        "outputs": len(result.loss_fn_outputs),
        "in_order": logprobs_of(result)[1] == logprobs_of(result)[41],
        "loss": result.metrics["loss:sum"],
        "steps": len(after.metrics or {}),
        "samples": asyncio.run(ask()),
    }


def custom_loss() -> dict[str, Any]:
    """Train with a loss that the client computes, and queue a step behind it."""
    service = tinker.ServiceClient()
    model = new_model(service)

    def loss(_data: Any, logprobs: list[torch.Tensor]) -> Any:
        return sum((one**2).sum() for one in logprobs), {"pairs": 1.0}

    future = model.forward_backward_custom([datum(5, 6, 7)], loss)
    step = model.optim_step(types.AdamParams(learning_rate=1e-3))
    result = future.result()
    return {"metrics": dict(result.metrics), "step": dict(step.result().metrics or {})}


def refusing() -> dict[str, Any]:
    """Use options that the hub does not offer, and return the errors that the user sees; then continue with the
    model.
    """
    service = tinker.ServiceClient()
    base = service.create_sampling_client(base_model=MODEL)
    prompt = types.ModelInput.from_ints(PROMPT)
    model = new_model(service)
    seen = {}

    def told(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001
            seen[name] = f"{type(error).__name__}: {error}"

    def sampled(**options: Any) -> Any:
        return lambda: base.sample(prompt, 1, types.SamplingParams(max_tokens=2, **options)).result()

    told("stable_reinforce", lambda: model.forward_backward([datum(5, 6)], "stable_reinforce").result())
    told("top_p", sampled(top_p=0.9))
    told("top_k", sampled(top_k=5))
    told("base_model", lambda: service.create_lora_training_client("meta/Other-8B").get_info())
    lost = "tinker://s:train:0/sampler_weights/none"
    told(
        "path",
        lambda: service.create_sampling_client(model_path=lost).sample(prompt, 1, types.SamplingParams()).result(),
    )
    told("optimizer", lambda: model.optim_step(types.DimuonParams(learning_rate=1e-3)).result())
    after = model.forward_backward([datum(5, 6)], "cross_entropy").result()
    told("spoiled", lambda: model.optim_step(types.AdamParams()).result())
    model.forward_backward([datum(5, 6)], "cross_entropy").result()
    step = model.optim_step(types.AdamParams()).result()
    return {"seen": seen, "after": len(after.loss_fn_outputs), "step": dict(step.metrics or {})}


def short() -> dict[str, Any]:
    """Train one step and draw one sample, for hubs and proxies that cause trouble."""
    service = tinker.ServiceClient()
    model = new_model(service)
    passed = model.forward_backward([datum(5, 6, 7)], "cross_entropy")
    step = model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    sampler = model.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=3, seed=4)
    answers = [sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params) for _ in range(3)]
    tokens = [[one.tokens for one in answer.result().sequences] for answer in answers]
    return {"logprobs": logprobs_of(passed.result()), "step": dict(step.metrics or {}), "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
    # The SDK's threads may still wait for a server that is gone.
    sys.stdout.flush()
    os._exit(0)
