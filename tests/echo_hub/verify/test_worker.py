from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.learner.policy import Policy
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.drawn import DrawnRollout, NodeEvidence, unpack_evidence, unpack_spans
from echo_hub.verify.repeats import RepeatedTokens
from echo_hub.verify.worker import Examiner
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE
from echo_shared.errors import LearnerError
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling import draws
from echo_shared.sampling.interface import Prefix
from echo_shared.sampling.torch_draws import most_likely
from echo_shared.sampling.torch_sampler import sample_groups
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION
from tests.echo_hub.core.trust.simulated import greedy as greedy_evidence
from tests.echo_hub.verify.conftest import MAX_TOKENS, Versions, adapters_in, as_drawn

Made = Callable[..., Examiner]


@pytest.fixture
def made(versions: Versions) -> Made:
    def make(*, kept: int = 3) -> Examiner:
        return Examiner(Policy.load(versions.settings), versions.settings, kept=kept)

    return make


def answers(
    examiner: Examiner, rollouts: Sequence[DrawnRollout], directory: RunDirectory
) -> dict[str, tuple[NodeEvidence, ...] | str]:
    found = list(examiner.examine(rollouts, adapters_in(directory)))
    assert sorted(frame["rollout_id"] for frame in found) == sorted(one.rollout_id for one in rollouts)
    return {frame["rollout_id"]: frame.get("cannot") or unpack_spans(frame["spans"]) for frame in found}


def is_clean(shown: Evidence) -> bool:
    return shown.draws[0] == shown.claims[0] == shown.num_tokens > 0 and shown.mismatch_kl < 1e-6


def all_logits(versions: Versions, drawn: DrawnRollout, version: int) -> NDArray[np.float32]:
    """Return the logits [T, V] before each token of the completion, computed for this sequence alone."""
    ids = np.concatenate([drawn.prompt_ids, drawn.completion_ids]).astype(np.int64)
    with versions.policy.holding(versions.policy.read_adapter(versions.directory.adapter(version))), torch.no_grad():
        logits_TV: NDArray[np.float32] = versions.policy.model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits_TV[-len(drawn.completion_ids) - 1 : -1]


def by_hand(versions: Versions, drawn: DrawnRollout, version: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the tokens' log-probabilities and the lower ends of the intervals of cumulative probability that draw
    them, both [T], computed for this sequence alone.
    """
    logits_TV = all_logits(versions, drawn, version)
    return draws.interval(logits_TV, drawn.completion_ids, temperature=versions.settings.temperature)


def test_honest_samples_pass_in_any_batch(versions: Versions, made: Made) -> None:
    rollouts = [one for version in (2, 0, 1) for one in versions.drawn(version, *range(10 * version, 10 * version + 5))]
    for spans in answers(made(), rollouts, versions.directory).values():
        assert not isinstance(spans, str)
        ((node_id, shown),) = spans
        assert node_id == "a" and is_clean(shown)


def test_evidence_equals_its_definition(versions: Versions, made: Made) -> None:
    """Evidence must equal its definition. Wrong versions and shifted claims make the tokens deviate by different
    amounts.
    """
    rollouts = [
        replace(
            one,
            behavior_logprobs=one.behavior_logprobs - np.float32(0.1),
            spans=(replace(one.spans[0], policy_version=2),),
        )
        for one in versions.drawn(1, *range(6))
    ]
    repeats = RepeatedTokens()
    for rollout_id, spans in answers(made(), rollouts, versions.directory).items():
        (drawn,) = [one for one in rollouts if one.rollout_id == rollout_id]
        below, logprobs = by_hand(versions, drawn, 2)
        count = len(drawn.completion_ids)
        u, weights = draws.uniforms(drawn.seed, drawn.index, count), repeats.weights(drawn)
        (expected,) = Evidence.of_spans(
            below, logprobs, u, drawn.behavior_logprobs, [count], claim_weights_N=weights.claims
        )
        ((_, shown),) = spans
        assert isinstance(shown, Evidence)
        assert (shown.draws, shown.claims) == (expected.draws, expected.claims)
        np.testing.assert_allclose(shown.draws_CS, expected.draws_CS, atol=0.02)
        np.testing.assert_allclose(shown.claims_CS, expected.claims_CS, atol=0.02)
        difference = logprobs - drawn.behavior_logprobs
        assert shown.mismatch_kl == pytest.approx((np.expm1(difference) - difference).sum(), rel=1e-3)


def test_a_tenants_adapter_may_have_another_rank_and_scale(versions: Versions, made: Made, tmp_path: Path) -> None:
    """The tenant's adapter is version 1's: with rank 8 instead of 4, where the further rows are 0, and with scale 4
    instead of 2. Its samples are checked in one batch with those of other versions.
    """
    own = versions.policy.read_adapter(versions.directory.adapter(1))
    weights = {
        name: torch.nn.functional.pad(weight / 2, (0, 4))
        if ".lora_B." in name
        else torch.nn.functional.pad(weight, (0, 0, 0, 4))
        for name, weight in own.items()
    }
    (tmp_path / WEIGHTS_FILE).write_bytes(save(weights))
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    version = FIRST_TENANT_VERSION + 3
    asked = [
        replace(one, temperature=0.8, spans=(replace(one.spans[0], policy_version=version),))
        for one in versions.drawn(1, 3, 4)
    ]
    rollouts = [*versions.drawn(2, 5), *asked, *versions.drawn(1, 6)]
    examiner = made()
    adapters = {**adapters_in(versions.directory), version: tmp_path}
    for part in (rollouts, asked, rollouts):
        for frame in examiner.examine(part, adapters):
            ((_, shown),) = unpack_spans(frame["spans"])
            assert is_clean(shown), frame["rollout_id"]
    weights["base_model.model.other.lora_A.weight"] = torch.zeros(8, 4)
    (tmp_path / WEIGHTS_FILE).write_bytes(save(weights))
    (answer,) = made().examine(asked[:1], adapters)
    assert "lora_A" in answer["cannot"] and "is gone" in answer["cannot"]


@pytest.mark.parametrize("temperature", [0.2, 1.5, 1e-9])
def test_a_rollout_is_examined_at_its_own_temperature(versions: Versions, made: Made, temperature: float) -> None:
    """Honest samples of requests pass at any temperature, in one batch with those of the run. Those that claim another
    temperature do not.
    """
    own, request = versions.drawn(1, 4), replace(versions.request(5, size=24), temperature=temperature)
    span, is_greedy = DrawnSpan(node_id="a", policy_version=1, num_tokens=0), temperature < 0.01
    asked = [
        replace(as_drawn(one, request, span), temperature=temperature, is_greedy=is_greedy)
        for one in versions.draw(1, [request])
    ]
    found = answers(made(), [*own, *asked], versions.directory)
    for rollout in (*own, *asked):
        ((_, shown),) = found[rollout.rollout_id]
        assert isinstance(shown, Evidence) and shown.draws[0] == shown.num_tokens
        assert is_clean(shown) or (rollout.is_greedy and not shown.num_claims)
    wrong = [replace(one, temperature=0.8, is_greedy=False) for one in asked]
    outside = sum(
        shown.num_tokens - shown.draws[0] for shown in evidence_in(answers(made(), wrong, versions.directory))
    )
    assert outside > 5


def evidence_in(found: dict[str, tuple[NodeEvidence, ...] | str]) -> Iterator[Evidence]:
    for spans in found.values():
        assert not isinstance(spans, str)
        yield from (shown for _, shown in spans)


def going_on(versions: Versions, number: int) -> list[DrawnRollout]:
    """Return completions that three nodes sampled in turn: node a 2 tokens with version 1, node b 3 more with version
    1, node c the rest with version 2.
    """
    request = versions.request(number, size=32)
    parts = [("a", 1, 2), ("b", 1, 3), ("c", 2, 0)]
    long = [rollout for rollout in versions.draw(1, [request]) if len(rollout.completion_ids) >= 6]
    prefixes = [Prefix(index=one.index, ids=one.completion_ids[:5], logprobs=one.behavior_logprobs[:5]) for one in long]
    again = versions.request(number, prefixes=prefixes)
    spans = [DrawnSpan(node_id=node_id, policy_version=version, num_tokens=count) for node_id, version, count in parts]
    found = [as_drawn(rollout, again, *spans) for rollout in versions.draw(2, [again])]
    assert len(found) > 2
    return found


def test_every_span_is_judged_under_its_version_for_its_node(versions: Versions, made: Made) -> None:
    for spans in answers(made(), going_on(versions, 50), versions.directory).values():
        assert [node_id for node_id, _ in spans] == ["a", "b", "c"]
        assert all(isinstance(shown, Evidence) and is_clean(shown) for _, shown in spans)
        assert [shown.num_tokens for _, shown in spans if isinstance(shown, Evidence)][:2] == [2, 3]


@pytest.mark.parametrize(("forger", "place"), [("a", 1), ("b", 3), ("c", 5)])
def test_a_forged_span_counts_only_against_its_node(versions: Versions, made: Made, forger: str, place: int) -> None:
    """Later tokens depend on the forged ones, but the nodes that sampled the later ones were honest."""
    forged = []
    for one in going_on(versions, 51):
        claims = one.behavior_logprobs.copy()
        claims[place] = -30.0
        forged.append(replace(one, behavior_logprobs=claims))
    for spans in answers(made(), forged, versions.directory).values():
        assert {node_id: isinstance(shown, Evidence) and is_clean(shown) for node_id, shown in spans} == {
            node_id: node_id != forger for node_id in "abc"
        }


def test_tokens_of_another_version_lie_outside(versions: Versions, made: Made) -> None:
    rollouts = [
        replace(one, spans=(replace(one.spans[0], policy_version=version),))
        for version in (0, 3)
        for one in versions.drawn(1, *range(20 * version, 20 * version + 10))
    ]
    found = answers(made(), rollouts, versions.directory)
    total = NO_EVIDENCE
    for spans in found.values():
        ((_, shown),) = spans
        assert isinstance(shown, Evidence)
        total += shown
    assert sum(total.draws[2:]) > 0.1 * total.num_tokens and total.claims[0] < 0.1 * total.num_tokens


def greedy(versions: Versions, version: int, *numbers: int) -> list[DrawnRollout]:
    requests = {number: versions.request(number, size=1) for number in numbers}
    with versions.policy.holding(versions.policy.read_adapter(versions.directory.adapter(version))):
        drawn = list(sample_groups(versions.policy.model, list(requests.values()), most_likely))
    span = DrawnSpan(node_id="a", policy_version=version, num_tokens=0)
    return [replace(as_drawn(one, requests[one.group_id], span), is_greedy=True) for one in drawn]


def test_a_greedy_choice_next_to_sampled_rollouts_shows_nothing(versions: Versions, made: Made) -> None:
    """Claims of a greedy choice belong to a temperature near 0, so they are ignored. Sampled rollouts of the same batch
    must not be affected.
    """
    chosen = [replace(one, behavior_logprobs=one.behavior_logprobs * 0) for one in greedy(versions, 1, *range(6))]
    rollouts = [*versions.drawn(1, 30), *chosen]
    found = answers(made(), rollouts, versions.directory)
    for one in rollouts:
        ((_, shown),) = found[one.rollout_id]
        assert isinstance(shown, Evidence) and shown.draws[0] == shown.num_tokens == len(one.completion_ids)
        assert shown.num_claims == (0 if one.is_greedy else shown.num_tokens)
        assert shown.claims_CS.any() != one.is_greedy


def test_another_choice_than_the_greedy_one_shows_its_shortfall(versions: Versions, made: Made) -> None:
    rollouts = [
        replace(one, spans=(replace(one.spans[0], policy_version=2),)) for one in greedy(versions, 1, *range(12))
    ]
    found = answers(made(), rollouts, versions.directory)
    total = NO_EVIDENCE
    for one in rollouts:
        scaled_TV = all_logits(versions, one, 2) / versions.settings.temperature
        own = scaled_TV[np.arange(len(one.completion_ids)), one.completion_ids]
        expected = greedy_evidence(scaled_TV.max(axis=-1) - own)
        ((_, shown),) = found[one.rollout_id]
        assert isinstance(shown, Evidence) and (shown.draws, shown.claims) == (expected.draws, expected.claims)
        np.testing.assert_allclose(shown.draws_CS, expected.draws_CS, atol=0.02)
        total += shown
    assert total.draws[0] > 0 and sum(total.draws[2:]) > 0


def test_a_version_that_is_gone_is_reported_and_the_others_are_checked(versions: Versions, made: Made) -> None:
    gone = [replace(one, spans=(replace(one.spans[0], policy_version=9),)) for one in versions.drawn(1, 0)]
    partly = [
        replace(one, spans=(*one.spans[:2], replace(one.spans[2], policy_version=9))) for one in going_on(versions, 52)
    ]
    here = versions.drawn(2, 1)
    found = answers(made(), [*gone, *partly, *here], versions.directory)
    assert all("version 9 is gone" in str(found[one.rollout_id]) for one in (*gone, *partly))
    assert all(not isinstance(found[one.rollout_id], str) for one in here)


def test_impossible_rollouts_never_reach_the_model(versions: Versions, made: Made) -> None:
    honest = versions.drawn(1, 0)
    one = honest[0]
    count = len(one.completion_ids)
    wrong = [
        replace(one, completion_ids=np.full(count, 40, np.int32)),
        replace(one, completion_ids=np.full(count, -1, np.int32)),
        replace(one, behavior_logprobs=np.full(count, np.nan, np.float32)),
        replace(one, behavior_logprobs=np.full(count, -np.inf, np.float32)),
        replace(one, behavior_logprobs=one.behavior_logprobs[:-1]),
        replace(one, completion_ids=one.completion_ids[:0], behavior_logprobs=one.behavior_logprobs[:0], spans=()),
        replace(one, prompt_ids=one.prompt_ids[:0]),
        replace(one, spans=()),
        replace(one, spans=(replace(one.spans[0], num_tokens=count + 1),)),
        replace(one, spans=(one.spans[0], replace(one.spans[0], num_tokens=0))),
    ]
    wrong = [replace(each, rollout_id=f"wrong-{number}") for number, each in enumerate(wrong)]
    found = answers(made(), [*wrong, *honest[1:]], versions.directory)
    assert all(isinstance(found[each.rollout_id], str) for each in wrong)
    assert all(not isinstance(found[each.rollout_id], str) for each in honest[1:])


def test_a_claim_as_low_as_can_be_leaves_numbers(versions: Versions, made: Made) -> None:
    lowest = np.finfo(np.float32).min
    (one, *_) = versions.drawn(1, 0)
    forged = replace(one, behavior_logprobs=np.full(len(one.completion_ids), lowest, np.float32))
    (((_, shown),),) = answers(made(), [forged], versions.directory).values()
    assert isinstance(shown, Evidence)
    assert shown.claims[-1] == len(one.completion_ids) and np.isfinite(shown.mismatch_kl)


def test_few_adapters_are_kept_and_others_read_again(versions: Versions, made: Made, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.adapter(1).parent.mkdir()
    for version in (1, 2, 3):
        directory.adapter(version).symlink_to(versions.directory.adapter(version))
    rollouts = {version: versions.drawn(version, 10 * version) for version in (0, 1, 2, 3)}
    examiner = made(kept=2)
    for version in (3, 1, 0, 2, 1, 3, 2):
        assert all(not isinstance(spans, str) for spans in answers(examiner, rollouts[version], directory).values()), (
            version
        )
    for version in (1, 2, 3):
        directory.adapter(version).unlink()
    told = {
        version: isinstance(answers(examiner, rollouts[version], directory)[f"{10 * version}-0"], str)
        for version in rollouts
    }
    assert told == {0: False, 1: True, 2: False, 3: False}, "the two that were used last are in memory"


class Crowded(Policy):
    """A policy whose device has memory for one rollout at a time, and none for rollouts of `too_long` tokens."""

    too_long = 1_000

    def intervals(self, batch: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.num_rollouts > 1 or len(batch.input_ids_T) >= self.too_long:
            raise torch.OutOfMemoryError("no memory left")
        return super().intervals(batch, **options)


def test_without_memory_for_many_rollouts_are_examined_one_by_one(versions: Versions) -> None:
    rollouts = [*versions.drawn(1, 0, 1), *versions.drawn(2, 2)]
    examiner = Examiner(Crowded.load(versions.settings), versions.settings, kept=2)
    plain = Examiner(Policy.load(versions.settings), versions.settings, kept=2)
    assert all(not isinstance(spans, str) for spans in answers(examiner, rollouts, versions.directory).values())
    Crowded.too_long = MAX_TOKENS
    try:
        told = {
            name for name, spans in answers(examiner, rollouts, versions.directory).items() if isinstance(spans, str)
        }
    finally:
        Crowded.too_long = 1_000
    longest = {one.rollout_id for one in rollouts if len(one.prompt_ids) + len(one.completion_ids) - 1 >= MAX_TOKENS}
    assert told == longest
    assert 0 < len(longest) < len(rollouts)
    assert all(not isinstance(spans, str) for spans in answers(plain, rollouts, versions.directory).values())


def test_the_time_is_divided_among_the_rollouts(versions: Versions, made: Made) -> None:
    found = list(made().examine([*versions.drawn(1, 0, 1), *going_on(versions, 53)], versions.adapters))
    assert all(frame["seconds"] > 0 for frame in found)


def test_several_versions_take_one_pass_and_each_computes_its_prompt(versions: Versions) -> None:
    passes: list[list[int]] = []

    class Counted(Policy):
        def intervals(self, batch: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            passes.append([count for _, count in options["adapters"]])
            assert sum(passes[-1]) == len(batch.input_ids_T)
            return super().intervals(batch, **options)

    settings = versions.settings.model_copy(
        update={"learner": versions.settings.learner.model_copy(update={"micro_batch_tokens": 10_000})}
    )
    mixed = [
        replace(one, rollout_id=f"{version} {one.rollout_id}")
        for version in (2, 0, 1)
        for one in versions.drawn(version, 1, 2)
    ]
    examiner = Examiner(Counted.load(settings), settings, kept=2)
    found = answers(examiner, mixed, versions.directory)
    assert all(not isinstance(spans, str) and is_clean(spans[0][1]) for spans in found.values())
    assert [len(counts) for counts in passes] == [3]
    passes.clear()
    examiner._policy._packs_up_to = 0
    again = answers(examiner, mixed, versions.directory)
    assert all(not isinstance(spans, str) and is_clean(spans[0][1]) for spans in again.values())
    assert [len(counts) for counts in passes] == [1, 1, 1], "a model that computes each row separately"


def test_a_model_with_nan_outputs_judges_no_node(versions: Versions) -> None:
    class Broken(Policy):
        def intervals(self, batch: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            below_N, logprobs_N = super().intervals(batch, **options)
            return below_N * np.nan, logprobs_N

    examiner = Examiner(Broken.load(versions.settings), versions.settings, kept=2)
    assert set(map(type, answers(examiner, versions.drawn(1, 0), versions.directory).values())) == {str}


PROMPTS = [np.array([number + 2, 7, 9], np.int32) for number in range(4)]


def test_a_rounding_is_measured_with_a_version(versions: Versions, made: Made) -> None:
    """Evidence must be honest under the given version, whatever version the last check used."""
    examiner = made()
    list(examiner.examine(versions.drawn(3, 0), versions.adapters))
    frame = examiner.measure("f32", 1, versions.adapters, PROMPTS)
    shown = unpack_evidence(frame["evidence"])
    assert frame["rounding"] == "f32" and frame["seconds"] > 0
    assert shown.num_tokens > 200 and sum(shown.draws[2:]) == sum(shown.claims[2:]) == 0


def test_checks_are_unchanged_by_a_measurement(versions: Versions, made: Made) -> None:
    """Measurements load an adapter; the checks after them must load theirs, or none."""
    examiner, rollouts = made(), [*versions.drawn(0, 1), *versions.drawn(2, 2)]
    before = answers(examiner, rollouts, versions.directory)
    examiner.measure("q4_0", 3, versions.adapters, PROMPTS)
    assert answers(examiner, rollouts, versions.directory) == before


def test_a_version_that_is_gone_cannot_be_measured(versions: Versions, made: Made) -> None:
    frame = made().measure("f32", 9, versions.adapters, PROMPTS)
    assert frame["rounding"] == "f32" and "cannot be read" in frame["cannot"] and "evidence" not in frame


def test_without_prompts_nothing_can_be_measured(versions: Versions, made: Made) -> None:
    assert "cannot" in made().measure("f32", 0, versions.adapters, [])


def test_a_model_with_nan_outputs_measures_nothing(versions: Versions, made: Made) -> None:
    """If NaN outputs were measured, the finest rounding scale would seem the most likely one, and honest nodes would
    seem to forge.
    """
    examiner = made()
    frame = examiner.measure("f32", 0, versions.adapters, PROMPTS)
    assert "evidence" in frame
    states = examiner._policy.states
    examiner._policy.states = lambda batch: states(batch) * torch.nan  # type: ignore[method-assign]
    assert "cannot" in examiner.measure("q8_0", 0, versions.adapters, PROMPTS)


def test_on_a_cpu_auto_is_float32(versions: Versions) -> None:
    learner = versions.settings.learner.model_copy(update={"precision": "auto"})
    settings = versions.settings.model_copy(update={"learner": learner})
    examiner = Examiner.open({"settings": settings.model_dump(mode="json"), "kept": 1})
    assert examiner._policy.head.weight.dtype is torch.float32
    chosen = settings.model_copy(update={"learner": learner.model_copy(update={"precision": "bfloat16"})})
    examiner = Examiner.open({"settings": chosen.model_dump(mode="json"), "kept": 1})
    assert examiner._policy.head.weight.dtype is torch.bfloat16


def test_a_missing_base_is_reported(versions: Versions, tmp_path: Path) -> None:
    settings = versions.settings.model_copy(update={"base_dir": tmp_path / "nothing"})
    with pytest.raises(LearnerError, match="cannot be loaded"):
        Examiner.open({"settings": settings.model_dump(mode="json"), "kept": 1})
