from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.harness.plain_losses import ModelsBench
from echo_hub.learner import logprobs
from echo_hub.learner.models.prompts import EMPTY_LOGPROB, PromptJob, prompt_logprobs


@pytest.mark.parametrize("rows_at_once", [1, 2, 1_000])
def test_log_probabilities_are_those_of_plain_torch(
    bench: ModelsBench, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are computed in chunks of `rows_at_once` positions, which may end inside a prompt."""
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", rows_at_once * bench.policy.vocab_size)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, bench.policy.vocab_size, length).astype(np.int32) for length in (1, 5, 9)]
    targets = [None, rng.integers(0, bench.policy.vocab_size, (5, 3)).astype(np.int32), None]
    jobs = [
        PromptJob(number=number, prompt_ids=prompt, top_k=4 * (number != 2), target_ids=of_prompt)
        for number, (prompt, of_prompt) in enumerate(zip(prompts, targets, strict=True))
    ]
    bench.seat.hold(bench.model(b_scale=0.3).adapter)
    found = prompt_logprobs(bench.policy, jobs)
    for job, result in zip(jobs, found, strict=True):
        with torch.no_grad():
            logits = bench.policy.model(input_ids=torch.from_numpy(job.prompt_ids.astype(np.int64))[None]).logits[0]
        every = logits.log_softmax(-1)[:-1].numpy()
        assert np.isnan(result.logprobs[0]) and result.logprobs.dtype == np.float32
        own = every[np.arange(len(every)), job.prompt_ids[1:]]
        np.testing.assert_allclose(result.logprobs[1:], own, atol=1e-5)
        if job.top_k:
            assert result.topk_ids is not None and result.topk_logprobs is not None
            assert result.topk_ids[0].tolist() == [0] * 4 and (result.topk_logprobs[0] == EMPTY_LOGPROB).all()
            np.testing.assert_allclose(result.topk_logprobs[1:], -np.sort(-every, axis=1)[:, :4], atol=1e-5)
            np.testing.assert_allclose(
                np.take_along_axis(every, result.topk_ids[1:], axis=1), result.topk_logprobs[1:], atol=1e-5
            )
        else:
            assert result.topk_ids is None and result.topk_logprobs is None
        if job.target_ids is not None:
            assert result.target_logprobs is not None and np.isnan(result.target_logprobs[0]).all()
            expected = np.take_along_axis(every, job.target_ids[1:], axis=1)
            np.testing.assert_allclose(result.target_logprobs[1:], expected, atol=1e-5)
