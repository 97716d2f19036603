"""One of two ranks that train the cases of `test_ranks`. Rank 0 also trains them alone and compares.

Usage: `python two_ranks.py CASES`, with torchrun's environment variables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo_hub.learner import frames
from echo_hub.learner.history import NO_HISTORY
from echo_hub.learner.policy import Policy
from echo_hub.learner.ranks import ALONE, TrainingRanks
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.step import make_optimizer, screened_step
from echo_hub.learner.weighting import weigh
from echo_shared.errors import LearnerError, StorageError
from echo_shared.process.child import HEADER_BYTES, unpack_frame
from echo_shared.sampling.torch_sampler import greedy

PROMPTS = [np.array([3, 4, 5], dtype=np.int32), np.array([9], dtype=np.int32)]


def trained(
    settings: LearnerSettings, steps: Sequence[list[TrainingGroup]], ranks: TrainingRanks
) -> tuple[Policy, list[dict[str, float]]]:
    policy = Policy.load(settings, ranks)
    optimizer = make_optimizer(policy, settings.training)
    history, curve = NO_HISTORY, []
    for groups in steps:
        outcome = screened_step(policy, optimizer, groups, settings, history=history)
        history = outcome.history
        curve.append(outcome.metrics)
    return policy, curve


def check_training(
    name: str, settings: LearnerSettings, steps: Sequence[list[TrainingGroup]], ranks: TrainingRanks
) -> None:
    policy, curve = trained(settings, steps, ranks)
    base = [p for p in policy.model.parameters() if isinstance(p, DTensor)]
    assert sum(p.to_local().numel() for p in base) == sum(p.numel() for p in base) // 2, "each rank has half"
    with ranks.whole(policy.model):
        mine = greedy(policy.model, PROMPTS[: 1 + ranks.rank], max_tokens=4 + ranks.rank, stop_ids=(1,))
    if ranks.rank:
        return
    alone, expected = trained(settings, steps, ALONE)
    for step, (one, both) in enumerate(zip(expected, curve, strict=True), start=1):
        assert one.keys() == both.keys()
        assert both["groups_left_out"] == (2 if name.startswith("left out") else 0)
        for key in one.keys() - {"train_s"}:
            np.testing.assert_allclose(both[key], one[key], rtol=1e-5, atol=1e-5, err_msg=f"{name}, {step}: {key}")
    apart = torch.cat([(policy.parameters[key] - weight).abs().flatten() for key, weight in alone.parameters.items()])
    # Adam divides a gradient by its own size. Where it is nearly 0, rounding decides how far the weight moves.
    assert float(apart.max()) < 1e-4, f"{name}: a hundredth of the learning rate"
    assert int((apart > 5e-6).sum()) <= len(apart) // 1_000, f"{name}: more than single weights differ"
    its = greedy(alone.model, PROMPTS[:1], max_tokens=4, stop_ids=(1,))
    assert [ids.tolist() for ids in mine] == [ids.tolist() for ids in its]


def check_shares(settings: LearnerSettings, steps: Sequence[list[TrainingGroup]], ranks: TrainingRanks) -> None:
    """Check that the shares of both ranks are equally large and together cover each batch once, apart from padding."""
    groups = weigh(steps[0], settings).updates[0]
    mine = ranks.micro_batches(groups, micro_batch_tokens=settings.learner.micro_batch_tokens)
    tokens = [len(batch.target_ids_N) for batch in mine]
    told = ranks.gather({"tokens": tokens, "weight": float(sum(batch.weights_N.sum() for batch in mine))})
    if told:
        whole = ALONE.micro_batches(groups, micro_batch_tokens=settings.learner.micro_batch_tokens)
        assert len(told[0]["tokens"]) == len(told[1]["tokens"]) == (len(whole) + 1) // 2
        assert len(whole) % 2 == 1 and told[1]["tokens"][-1] == 0
        assert sum(told[0]["tokens"] + told[1]["tokens"]) == sum(len(batch.target_ids_N) for batch in whole)
        weight = float(sum(batch.weights_N.sum() for batch in whole))
        np.testing.assert_allclose(told[0]["weight"] + told[1]["weight"], weight, rtol=1e-6)


def check_words(ranks: TrainingRanks) -> None:
    array = np.arange(3, dtype=np.float32)
    assert ranks.tell({"n": 1, "array": array} if ranks.rank == 0 else None)["array"].tolist() == [0, 1, 2]
    assert ranks.tell({"by": 1} if ranks.rank == 1 else None, by=1) == {"by": 1}
    given: dict[str, Tensor] = (
        {"a": torch.ones(2, 2), "b": torch.tensor([7], dtype=torch.uint8)} if ranks.rank == 0 else {}
    )
    told = ranks.tell_tensors(given)
    assert torch.equal(told["a"], torch.ones(2, 2)) and told["b"].dtype == torch.uint8
    assert ranks.gather({"rank": ranks.rank}) == ([] if ranks.rank else [{"rank": 0}, {"rank": 1}])
    values = [torch.full((2, 2), 1.0 + ranks.rank), torch.tensor(10.0 * ranks.rank)]
    ranks.add_up(values)
    assert values[0].tolist() == [[3.0, 3.0], [3.0, 3.0]] and float(values[1]) == 10
    assert ranks.collect(torch.tensor([[float(ranks.rank)]])).tolist() == [[0.0], [1.0]]
    with ranks.agreement():
        pass
    try:
        with ranks.agreement():
            if ranks.rank == 1:
                raise StorageError("Only here.")
        raise AssertionError("rank 1 had failed")
    except StorageError as error:
        assert error.what == "Only here."


def check_place(settings: LearnerSettings, ranks: TrainingRanks) -> None:
    placed = ranks.place(settings)
    assert placed.base_dir == Path("elsewhere") and placed.learner.threads == 1
    try:
        with ranks.agreement():
            Policy.load(placed)
        raise AssertionError("there is no base model elsewhere")
    except LearnerError as error:
        assert error.what == "The base model cannot be loaded."


def main() -> None:
    torch.set_num_threads(1)
    ranks = TrainingRanks.join(base_dir=Path("elsewhere"))
    check_words(ranks)
    cases = unpack_frame(Path(sys.argv[1]).read_bytes()[HEADER_BYTES:])
    for name, case in cases.items():
        settings = LearnerSettings.model_validate(case["settings"])
        steps = [frames.unpack_groups(groups) for groups in case["steps"]]
        check_training(name, settings, steps, ranks)
        if name == "uneven":
            check_shares(settings, steps, ranks)
    check_place(settings, ranks)
    ranks.leave()


if __name__ == "__main__":
    main()
