"""Greedy accuracy of an exported model, measured with programs that do not know Echo. This file imports nothing of
Echo.

    python outside.py transformers DIRECTORY PROBLEMS
    python outside.py llama_cpp FILE PROBLEMS

PROBLEMS is a JSON file: the system prompt, the text after each question, the largest number of tokens of an answer, and
pairs of a question and its answer. `transformers` means AutoModelForCausalLM and AutoTokenizer with the chat template
in the directory; `llama_cpp` means llama-cpp-python's `Llama.create_chat_completion` with the chat template in the
file. The last number in a reply counts as its answer. The output is one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Message = dict[str, str]


def of_transformers(directory: str, max_tokens: int) -> Callable[[list[Message]], str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def answer(messages: list[Message]) -> str:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


def of_llama_cpp(file: str, max_tokens: int) -> Callable[[list[Message]], str]:
    from llama_cpp import Llama

    model: Any = Llama(file, n_ctx=1_024, verbose=False)

    def answer(messages: list[Message]) -> str:
        said = model.create_chat_completion(messages, temperature=0.0, max_tokens=max_tokens)
        return str(said["choices"][0]["message"]["content"])

    return answer


def modules() -> list[str]:
    """Return the names of all imported modules, so that the caller can check that none belongs to Echo."""
    return list(sys.modules)


def main(program: str, model: str, problems_file: str) -> None:
    asked: Mapping[str, Any] = json.loads(Path(problems_file).read_text())
    answer = {"transformers": of_transformers, "llama_cpp": of_llama_cpp}[program](model, asked["max_tokens"])
    began, solved = time.perf_counter(), []
    system = [{"role": "system", "content": asked["system_prompt"]}] if asked["system_prompt"] else []
    for question, expected in asked["problems"]:
        said = answer([*system, {"role": "user", "content": question + asked["prompt_suffix"]}])
        solved.append(re.findall(r"-?\d+(?:[.,]\d+)*", said)[-1:] == [expected])
    assert not any(name.startswith("echo_") for name in modules())
    seconds = time.perf_counter() - began
    print(json.dumps({"accuracy": sum(solved) / len(solved), "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
