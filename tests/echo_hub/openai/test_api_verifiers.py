"""The clients of verifiers 0.4.0, with which its users train and evaluate."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.doors import doors_python
from tests.echo_hub.openai.conftest import OpenAiPort
from tests.echo_hub.openai.hub_sampling import BASE

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Chat template that renders like the hub: the built-in base has no template."""
CLIENT = Path(__file__).with_name("verifiers_client.py")


async def test_verifiers_trains_and_evaluates_through_the_hub(port: OpenAiPort, tmp_path: Path) -> None:
    python = doors_python()
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(PLAIN)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ECHO_KEY": port.key, "HF_HUB_OFFLINE": "1"}
    child = await asyncio.create_subprocess_exec(
        str(python), str(CLIENT), port.url, str(tokenizer), stdout=asyncio.subprocess.PIPE, env=environment
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    told = json.loads(out.decode().splitlines()[-1])
    codec = port.sampling.codec
    newest, pinned, base = told["trained"]
    for answer, exact in ((newest, "run@1"), (pinned, "run@1"), (base, "base")):
        direct = await drawn_directly(port, exact)
        ids = direct["token_ids"]
        assert answer["tokens"]["prompt_ids"] == codec.encode_prompt("12+34=").tolist()
        assert answer["tokens"]["completion_ids"] == ids and answer["finish_reason"] == direct["finish_reason"]
        logprobs = [entry["logprob"] for entry in direct["logprobs"]["content"]]
        assert answer["tokens"]["completion_logprobs"] == logprobs
        assert answer["message"]["content"] == codec.decode(ids)
    assert newest["tokens"] == pinned["tokens"] != base["tokens"]
    # This client has read max_model_len, and refuses the prompt itself.
    assert told["too_long"] == [400, "Prompt length (300) exceeds maximum context length (256)."]
    assert told["unknown"][0] == 404 and "model_not_found" in told["unknown"][1]
    assert told["evaluated"]["message"]["content"] == codec.decode(newest["tokens"]["completion_ids"])


async def drawn_directly(port: OpenAiPort, model: str) -> Any:
    prompt = port.sampling.codec.encode_prompt("12+34=").tolist()
    body = {"model": model, "token_ids": prompt, "sampling_params": {"max_tokens": 6, "seed": 3}}
    status, answer = await port.post("/inference/v1/generate", body)
    assert status == 200
    return answer["choices"][0]
