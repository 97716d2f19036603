"""verifiers' own clients against a hub, with the interpreter of `make doors`: python verifiers_client.py URL TOKENIZER

The token is in ECHO_KEY. Prints, as JSON, what the clients for training and for evaluation have made of the answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from renderers import DefaultRendererConfig
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

MESSAGES = [{"role": "user", "content": "12+34="}]


async def main(url: str, tokenizer: str) -> dict[str, Any]:
    shared = {"base_url": f"{url}/v1", "api_key_var": "ECHO_KEY"}
    training = TrainClient(TrainClientConfig(**shared, renderer=DefaultRendererConfig(), renderer_model_name=tokenizer))
    evaluating = EvalClient(EvalClientConfig(**shared))
    sampling = SamplingConfig(temperature=1.0, max_tokens=6, seed=3)
    told: dict[str, Any] = {"trained": []}
    for model in ("run", "run@1", "base"):
        body = {"model": model, "messages": MESSAGES}
        response = await training.get_response(ChatDialect(), body, sampling)
        told["trained"].append(json.loads(response.model_dump_json(exclude={"raw"})))
    try:
        await training.get_response(
            ChatDialect(), {"model": "run", "messages": [{"role": "user", "content": "1" * 300}]}, sampling
        )
    except ProviderError as error:
        told["too_long"] = [error.status_code, str(error)]
    try:
        await training.get_response(ChatDialect(), {"model": "other", "messages": MESSAGES}, sampling)
    except ProviderError as error:
        told["unknown"] = [error.status_code, str(error)]
    body = {"model": "run", "messages": MESSAGES, "max_tokens": 6, "seed": 3}  # This client sends the body unchanged.
    response = await evaluating.get_response(ChatDialect(), body, sampling)
    told["evaluated"] = json.loads(response.model_dump_json(exclude={"raw"}))
    await training.close()
    await evaluating.close()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
