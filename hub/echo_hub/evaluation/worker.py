"""A process that samples evaluations: `python -m echo_hub.evaluation.worker`, controlled by
`echo_hub.evaluation.evaluator`.

It samples like the learner, with the adapter named in the request or the bare base. It returns each rollout as soon as
it is finished.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from echo_hub.learner import determinism, frames
from echo_hub.learner.drawing import Drawing
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_shared.process.answering import serve
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.sampling.torch_draws import draw, most_likely


class Drawer:
    """Samples rollouts with the loaded base model; create a drawer with `open`."""

    def __init__(self, policy: Policy, settings: LearnerSettings) -> None:
        self._policy = policy
        self._drawing = Drawing(policy, kv_cache_bytes=settings.learner.kv_cache_bytes, multi_turn=settings.multi_turn)

    @classmethod
    def open(cls, frame: Frame) -> Drawer:
        """Load the base model. Raises LearnerError if that fails."""
        settings = LearnerSettings.model_validate(frame["settings"])
        if settings.learner.threads:
            torch.set_num_threads(settings.learner.threads)
        determinism.choose(deterministic=settings.learner.deterministic)
        return cls(Policy.load(settings), settings)

    def draw(self, request: Frame) -> Iterator[Frame]:
        """Yield one answer per rollout of `groups`, which all name the same version.

        Raises LearnerError if the version's adapter cannot be read.
        """
        began = time.perf_counter()
        adapters: list[str] = list(request["adapters"].values())
        held: AbstractContextManager[Any] = self._policy.model.disable_adapter()
        if adapters:
            held = self._policy.holding(self._policy.read_adapter(Path(adapters[0])))
        groups = [frames.unpack_request(group) for group in request["groups"]]
        with held:
            for rollout in self._drawing.draw(groups, most_likely if request["greedy"] else draw):
                yield {"rollout": frames.pack_rollout(rollout), "drawing_s": time.perf_counter() - began}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(serve(ParentPipe(), lambda opening: Drawer.open(opening).draw))
