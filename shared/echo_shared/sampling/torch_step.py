"""Decoding steps at fixed shapes, each captured once as a CUDA graph and then replayed.

Launching the kernels of one step from Python takes about 30 ms for a model of 0.6 B; computing them takes 5 to 9 ms
(H200, 8 to 256 rows). A CUDA graph launches all kernels at once, but only with the shapes and addresses of its capture.
So a step computes a bucket: the batch, with the numbers of rows and columns rounded up.

- Each step's numbers (ids, positions, first columns, written column, uniforms, temperatures) go to one tensor of the
  bucket, in one transfer.
- Attention reads all columns of the bucket; a mask hides the columns outside the row's sequence.
- Unused rows of the bucket draw tokens, too; these tokens are discarded.

An adapter's tensors may change between steps if the new values are copied into them.

Dimensions: R rows and C columns of a bucket, N rows in use, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_shared.sampling.torch_cache import SlotCache, cache_argument
from echo_shared.sampling.torch_draws import UNDECIDED, Choose, redraw_undecided

log = logging.getLogger(__name__)

CAPTURED_AFTER: Final = 2
"""Steps of a bucket after which it is captured. In the first step, libraries choose kernels and allocate memory."""
MOST_GRAPHS: Final = 24
"""Maximum number of graphs. A new graph replaces the least recently used one."""
MOST_FAILURES: Final = 3
"""Failed captures after which no step is captured any more."""
_LEAST_COLUMNS: Final = 128


class FixedSteps:
    """Steps of one model on one SlotCache, by bucket. All layers must hold every token's keys and values."""

    def __init__(self, model: Any, slots: SlotCache, choose: Choose) -> None:
        self._model = model
        self._slots = slots
        self._choose = choose
        self._steps: dict[tuple[int, int], _Step] = {}
        self._memory: Any = None
        """`slots.memory` for which the graphs were captured. If it changes, their addresses are invalid."""
        self._captures = slots.device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if self._captures else None
        """Memory for what steps compute in between; all graphs share it, because only one runs at a time."""
        self._failures = 0

    def step(self, inputs: NDArray[np.int64], drawing: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute a step for all rows in use: `inputs` holds token ids and positions, [2, N]; `drawing` uniforms and
        temperatures, [2, N]. Return the drawn token ids and their log-probabilities in nats, [2, N].
        """
        slots = self._slots
        slots.make_space()
        if self._memory is not slots.memory:
            self.forget()
            self._memory = slots.memory
        count, high = inputs.shape[1], slots.high
        step = self._step_of(count, high)
        host = step.host
        host[:, count:] = 0
        host[:2, :count] = inputs
        host[2, :count], host[2, count:] = slots.starts, high  # An unused row attends to its own token.
        host[3] = high
        host[4:, :count].view(np.float64)[:] = drawing
        host[4:, count:].view(np.float64)[:] = [[0.5], [1.0]]  # u = 0 is never decided in float32.
        drawn = self._run(step)[:, :count].numpy(force=True)
        if UNDECIDED in drawn[0]:
            u_R, temperature_R = step.drawing
            redraw_undecided(drawn, self._logits(step), u_R, temperature_R)
        slots.after_step()
        return drawn

    def forget(self) -> None:
        """Drop all graphs. Call this if a tensor that the model computes with has been replaced."""
        self._steps.clear()

    def _step_of(self, count: int, high: int) -> _Step:
        rows = min(self._slots.rows, 1 << (count - 1).bit_length())
        quantum = max(_LEAST_COLUMNS, self._slots.columns // 4)
        columns = min(self._slots.columns, (high // quantum + 1) * quantum)
        step = self._steps.pop((rows, columns), None) or _Step(self._slots.device, rows, columns)
        if len(self._steps) >= MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]
        self._steps[rows, columns] = step
        return step

    def _run(self, step: _Step) -> Tensor:
        step.send()
        if step.graph is not None:
            step.graph.replay()
            return step.drawn
        drawn = self._compute(step)
        step.computed += 1
        if self._captures and step.computed == CAPTURED_AFTER:
            self._capture(step, drawn)
        return drawn

    def _compute(self, step: _Step) -> Tensor:
        """Return token ids and log-probabilities [2, R]. Does not wait for the device."""
        u_R, temperature_R = step.drawing
        tokens_R, logprobs_R = self._choose(self._logits(step), u_R, temperature_R)
        return torch.stack([tokens_R.double(), logprobs_R.double()])

    def _logits(self, step: _Step) -> Tensor:
        ids_R, positions_R, starts_R, at_R = step.inputs[:4]
        mask_RC = (step.columns_C >= starts_R[:, None]) & (step.columns_C <= at_R[:, None])
        device = self._slots.device.type
        autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,  # A graph must not read weights that were converted outside of it.
        )
        with autocast, self._slots.fixed(len(ids_R), len(step.columns_C), at_R[:1]):
            output = self._model(
                input_ids=ids_R[:, None],
                position_ids=positions_R[:, None],
                attention_mask=mask_RC[:, None, None],
                use_cache=True,
                logits_to_keep=1,
                **cache_argument(self._slots.cache),
            )
        logits_RV: Tensor = output.logits[:, -1]
        return logits_RV

    def _capture(self, step: _Step, computed: Tensor) -> None:
        """Capture a step. A step writes the same keys and values however often it is repeated, so a replay must return
        what was `computed`; otherwise no step is captured from then on.
        """
        try:
            graph, drawn = _captured(lambda: self._compute(step), self._pool, self._slots.device)
            graph.replay()
            same = torch.equal(drawn, computed)
        except RuntimeError as error:  # Work of another thread can fail a capture, so it may be repeated.
            step.computed = 0
            self._failures += 1
            self._captures = self._failures < MOST_FAILURES
            log.warning("A sampling step could not be captured as a CUDA graph, and is slower without: %s", error)
            return
        if same:
            step.graph, step.drawn = graph, drawn
            return
        self._captures = False
        self.forget()
        log.warning(
            "A CUDA graph draws other tokens than the step that it captured. Sampling continues without graphs."
        )


class _Step:
    """The tensors of one bucket, at fixed addresses."""

    def __init__(self, device: torch.device, rows: int, columns: int) -> None:
        host = torch.zeros((6, rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sent = host
        self.host: NDArray[np.int64] = host.numpy()
        """Numbers of the next step, [6, R]: ids, positions, first columns, written column, and, as the bits of float64,
        uniforms and temperatures."""
        self.inputs = torch.zeros((6, rows), dtype=torch.int64, device=device)
        self.columns_C = torch.arange(columns, device=device)
        self.computed = 0
        """Number of times that this bucket's step was computed without a graph."""
        self.graph: Any = None
        self.drawn: Tensor = self.inputs
        """What the graph returns, after it was captured."""

    @property
    def drawing(self) -> Tensor:
        """Uniforms and temperatures [2, R]."""
        return self.inputs[4:].view(torch.float64)

    def send(self) -> None:
        self.inputs.copy_(self._sent, non_blocking=True)


def _captured(compute: Callable[[], Tensor], pool: Any, device: torch.device) -> tuple[Any, Tensor]:
    """Return a CUDA graph of `compute`, and the tensor that each replay fills."""
    with torch.cuda.device(device):
        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # Libraries allocate their workspaces for this stream.
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may copy an adapter to the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            drawn = compute()
    return graph, drawn
