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
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from echo_shared.sampling.torch_cache import SlotCache, cache_argument
from echo_shared.sampling.torch_draws import UNDECIDED, Choose, redraw_undecided
from echo_shared.sampling.torch_routes import Routers, recording

log = logging.getLogger(__name__)

CAPTURED_AFTER: Final = 2
"""Number of times that a bucket's step is computed before its capture. The first time, libraries choose kernels and
allocate memory, which a graph must not contain.
"""
MOST_GRAPHS: Final = 24
"""Maximum number of graphs. A new graph replaces the least recently used one."""
MOST_FAILURES: Final = 3
"""Number of failed captures after which captures are no longer tried."""
_LEAST_COLUMNS: Final = 128


def takes_boolean_masks(model: Any) -> bool:
    """Return True if the model's attention takes boolean masks in four dimensions. Eager attention does not: it adds
    the mask to the scores."""
    return ALL_MASK_ATTENTION_FUNCTIONS[model.config._attn_implementation] is not eager_mask


class FixedSteps:
    """Steps of one model on one SlotCache, by bucket. All layers must hold every token's keys and values."""

    def __init__(self, model: Any, slots: SlotCache, choose: Choose, routers: Routers | None = None) -> None:
        self._model = model
        self._slots = slots
        self._choose = choose
        self._routers = routers
        self.routes_RB: NDArray[np.uint8] | None = None
        """Routes (ids of the experts that each layer chose) of the tokens that the last step fed, [rows, B]; None for a
        model without experts.
        """
        self._steps: dict[tuple[int, int], _Step] = {}
        self._memory: Any = None
        """Value of `slots.memory` when the graphs were captured. If `slots.memory` changes, the graphs' addresses are
        invalid.
        """
        self._captures = slots.device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if self._captures else None
        """Memory pool for the intermediate results of steps. All graphs share it, because only one runs at a time."""
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
        host[2, :count], host[2, count:] = slots.starts, high  # An unused row attends only to the token that it feeds.
        host[3] = high
        host[4:, :count].view(np.float64)[:] = drawing
        # Not u = 0, which float32 never decides: an unused row would be repeated in float64.
        host[4:, count:].view(np.float64)[:] = [[0.5], [1.0]]
        found = self._run(step)[:, :count].numpy(force=True)
        drawn = found[:2]
        self.routes_RB = found[2:].T.astype(np.uint8) if len(found) > 2 else None
        if UNDECIDED in drawn[0]:
            u_R, temperature_R = step.drawing
            redraw_undecided(drawn, self._logits(step), u_R, temperature_R)
        slots.after_step()
        return drawn

    def forget(self) -> None:
        """Drop all captured graphs. Call this after replacing a tensor of the model, because graphs use the old
        tensor's address.
        """
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
        """Return token ids and log-probabilities [2, R], followed by the B expert ids of a route [2 + B, R] if routes
        are recorded. Does not wait for the device.
        """
        u_R, temperature_R = step.drawing
        with recording(self._routers) as recorded:
            logits_RV = self._logits(step)
        tokens_R, logprobs_R = self._choose(logits_RV, u_R, temperature_R)
        drawn = torch.stack([tokens_R.double(), logprobs_R.double()])
        return drawn if self._routers is None else torch.cat([drawn, *(ids_RK.T.double() for ids_RK in recorded)])

    def _logits(self, step: _Step) -> Tensor:
        ids_R, positions_R, starts_R, at_R = step.inputs[:4]
        mask_RC = (step.columns_C >= starts_R[:, None]) & (step.columns_C <= at_R[:, None])
        device = self._slots.device.type
        autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            # Do not cache weights converted by autocast: a graph must not read tensors that were made outside of it.
            cache_enabled=False,
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
        """Capture a step. A repeated step writes the same keys and values, so a replay must return what was `computed`.
        If it does not, no step is captured from then on.
        """
        try:
            graph, drawn = self._captured(step)
            graph.replay()
            same = torch.equal(drawn, computed)
        except RuntimeError as error:  # Another thread's work can make a capture fail, so a failed capture is repeated.
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

    def _captured(self, step: _Step) -> tuple[Any, Tensor]:
        """Return a CUDA graph of a step, and the tensor that each replay fills."""
        with torch.cuda.device(self._slots.device):
            stream: Any = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(step)  # Libraries allocate their workspaces for this stream.
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # "thread_local": another thread may copy an adapter to the device during the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                drawn = self._compute(step)
        return graph, drawn


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
        """The tensor that the captured graph fills: token ids and log-probabilities."""

    @property
    def drawing(self) -> Tensor:
        """The random numbers (uniforms) and temperatures of the next draws, one of each per row, [2, R]."""
        return self.inputs[4:].view(torch.float64)

    def send(self) -> None:
        self.inputs.copy_(self._sent, non_blocking=True)
