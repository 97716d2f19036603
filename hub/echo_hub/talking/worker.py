"""A process that samples replies for the page "Try it": `python -m echo_hub.talking.worker`, controlled by
`echo_hub.talking.trying`.

The process has low priority. It holds a second copy of the base model; the hub ends the idle process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from echo_hub.learner.settings import LearnerSettings
from echo_hub.talking.talker import Talker
from echo_shared.process.answering import serve
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.process.priority import yield_to_others


def opened(frame: Frame) -> Callable[[Frame], Iterator[Frame]]:
    """Load the base model and return the handler of requests. Raises LearnerError."""
    settings = LearnerSettings.model_validate(frame["settings"])
    if settings.learner.threads:
        torch.set_num_threads(settings.learner.threads)
    talker = Talker.open(settings)

    def replies(request: Frame) -> Iterator[Frame]:
        parts = talker.reply(
            request["prompt_ids"],
            adapter=Path(request["adapter"]) if request["adapter"] else None,
            samples=request["samples"],
            temperature=request["temperature"],
            max_tokens=request["max_tokens"],
            seed=request["seed"],
        )
        for part in parts:
            yield {"index": part.index, "ids": part.ids, "finish": part.finish}

    return replies


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    yield_to_others()
    sys.exit(serve(ParentPipe(), opened))
