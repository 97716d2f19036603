"""Fuzzing of one target with atheris: `python -m benchmarks.fuzzing.child TARGET CORPUS [libFuzzer's own options]`.

libFuzzer ends the process: with status 0 after the requested number of runs, or with a finding, written to a file
(`-artifact_prefix`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["echo_shared", "echo_hub.net.tracker", "echo_node.net.mesh_proof"]):
    from benchmarks.fuzzing.targets import TARGETS, Target, run


def main() -> None:
    target, corpus = TARGETS[sys.argv[1]], Path(sys.argv[2])
    logging.disable(logging.CRITICAL)
    for number, example in enumerate(target.examples()):
        (corpus / f"example-{number}").write_bytes(example)
    options = [f"-max_len={target.most_bytes}", *sys.argv[2:]]
    atheris.Setup([sys.argv[0], *options], partial(run, target), custom_mutator=_mutator(target))
    atheris.Fuzz()


def _mutator(target: Target) -> Callable[[bytes, int, int], bytes] | None:
    mutate = target.mutate
    if mutate is None:
        return None
    return lambda data, most, seed: mutate(bytes(data), most, seed, atheris.Mutate)


if __name__ == "__main__":
    main()
