"""Log-probabilities of prompts at temperature 1, in float32: of their own tokens, of the likeliest tokens, and of given
tokens. Prompts of one adapter that wait together are computed in one pass.

Dimensions: N positions of a prompt, K ids of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner.logprobs import logits_in_chunks
from echo_hub.learner.models.data import PackedRows
from echo_hub.learner.policy import Policy
from echo_hub.tenants.requests import PromptLogprobs

EMPTY_LOGPROB: Final = -99_999.0
"""Value of cells without a log-probability, in arrays that cannot have NaN when they are sent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptJob:
    """A request for the log-probabilities of a prompt. `number` identifies the request."""

    number: int
    prompt_ids: NDArray[np.int32]
    top_k: int = 0
    target_ids: NDArray[np.int32] | None = None
    """[N, K]: token ids whose log-probabilities are wanted at each position. Row i is predicted from the tokens before
    i.
    """


@torch.inference_mode()
def prompt_logprobs(policy: Policy, jobs: Sequence[PromptJob]) -> list[PromptLogprobs]:
    """Return the results of the jobs, with the adapter that the policy holds."""
    batch = PackedRows.of([job.prompt_ids for job in jobs], policy.device)
    found = [_Cells.of(job) for job in jobs]
    ends = np.cumsum(batch.lengths)
    with policy.autocast():
        states_NH = policy.predicting_states(batch)
        for part, logits in logits_in_chunks(states_NH, policy.head):
            first = 0
            for job, cells, end in zip(jobs, found, ends.tolist(), strict=True):
                low, high = max(first, part.start), min(end, part.stop)
                if low < high:
                    cells.fill(job, low - first, logits[low - part.start : high - part.start])
                first = end
    return [cells.result() for cells in found]


@dataclass(slots=True, kw_only=True, eq=False)
class _Cells:
    """The result of one prompt job, which fills up while the logits are computed in chunks."""

    logprobs: NDArray[np.float32]
    topk_ids: NDArray[np.int32]
    topk_logprobs: NDArray[np.float32]
    of_targets: NDArray[np.float32] | None

    @classmethod
    def of(cls, job: PromptJob) -> _Cells:
        count = len(job.prompt_ids)
        return cls(
            logprobs=np.full(count, np.nan, dtype=np.float32),
            topk_ids=np.zeros((count, job.top_k), dtype=np.int32),
            topk_logprobs=np.full((count, job.top_k), EMPTY_LOGPROB, dtype=np.float32),
            of_targets=None if job.target_ids is None else np.full(job.target_ids.shape, np.nan, dtype=np.float32),
        )

    def fill(self, job: PromptJob, start: int, logits_NV: Tensor) -> None:
        """Take the logits of positions from `start` on. Those of position i predict token i + 1."""
        rows = slice(start + 1, min(start + 1 + len(logits_NV), len(job.prompt_ids)))
        logits_NV = logits_NV[: rows.stop - rows.start]
        if not len(logits_NV):
            return
        totals_N1 = logits_NV.logsumexp(dim=1, keepdim=True)

        def chosen(ids: NDArray[np.int32]) -> NDArray[np.float32]:
            wanted = torch.from_numpy(ids.astype(np.int64)).to(logits_NV.device)
            values: NDArray[np.float32] = (logits_NV.gather(1, wanted) - totals_N1).float().numpy(force=True)
            return values

        self.logprobs[rows] = chosen(job.prompt_ids[rows, None])[:, 0]
        if job.top_k:
            values, ids = logits_NV.topk(job.top_k, dim=1)
            self.topk_ids[rows] = ids.numpy(force=True)
            self.topk_logprobs[rows] = (values - totals_N1).float().numpy(force=True)
        if job.target_ids is not None and self.of_targets is not None:
            self.of_targets[rows] = chosen(job.target_ids[rows])

    def result(self) -> PromptLogprobs:
        has_topk = self.topk_ids.shape[1] > 0
        return PromptLogprobs(
            logprobs=self.logprobs,
            topk_ids=self.topk_ids if has_topk else None,
            topk_logprobs=self.topk_logprobs if has_topk else None,
            target_logprobs=self.of_targets,
        )
