"""A stranger checks a small real run: an honest one passes, and each kind of forgery is found and named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.forging import Change, changed, in_json
from echo_hub.bundles.blocks import BundledGroup, BundledRollout
from echo_hub.bundles.checking import CheckedBundle, CheckSettings, check_bundle
from echo_hub.bundles.discrepancies import DiscrepancyKind
from echo_hub.bundles.report import as_json, lines_of
from echo_hub.evaluation.work_count import WorkCount
from echo_hub.run.base_files import resolve_base
from echo_shared.errors import CodecError, ConfigError
from echo_shared.signing.identity import Identity, fingerprint
from echo_shared.wire.messages import FinishReason, ReceiptState
from tests.echo_hub.bundles.conftest import STEPS

STRANGER = Identity.from_seed(bytes(32))


def checked(bundle: Path, **wanted: Any) -> CheckedBundle:
    settings = CheckSettings(**{"base": "builtin:tiny", "device": "cpu", "repeats_step": False, **wanted})
    return asyncio.run(check_bundle(bundle, settings, WorkCount(doing="Checking", units="rollouts")))


def named(found: CheckedBundle) -> list[tuple[DiscrepancyKind, str]]:
    return [(one.kind, one.place) for one in found.discrepancies]


@pytest.fixture(scope="session")
def honest(bundle: Path, hub_key: Identity) -> CheckedBundle:
    return checked(bundle, repeats_step=True, hub_key=fingerprint(hub_key.public_key))


def test_an_honest_run_passes(honest: CheckedBundle) -> None:
    assert named(honest) == [], list(map(str, honest.discrepancies))
    assert honest.checked_rollouts == honest.chosen == honest.rollouts >= STEPS * 24
    assert honest.refused == {} and honest.not_scored == "" and honest.without_tokens == 0
    (node,) = honest.nodes
    assert (node.node, node.numerics, node.verdict) == ("hub", "torch/f32/?", "honest")
    assert node.rollouts == honest.rollouts and node.tokens == honest.checked_tokens
    assert node.far == 0 and node.farthest_nats < 0.01 and node.nats < 1.0
    assert honest.rewards is not None and honest.rewards.failed == 0
    assert (honest.rewards.rewards, honest.rewards.prompts) == (honest.rollouts, honest.groups)


def test_the_named_step_gives_the_same_bits(honest: CheckedBundle) -> None:
    step = honest.step
    assert step is not None and step.cannot == ""
    assert step.is_same and step.is_same_machine and step.changed == 0 and step.weights > 1_000
    assert step.loss == step.recorded_loss and step.grad_norm == step.recorded_grad_norm


def test_the_report_says_what_it_shows(honest: CheckedBundle) -> None:
    lines = list(lines_of(honest))
    assert "Nothing was found that is not as the bundle says." in lines
    assert any("are equal to the bit" in line for line in lines)
    assert any("does not show" in line for line in lines)
    said = json.loads(json.dumps(as_json(honest)))
    assert said["found"] == {} and said["checked_tokens"] == honest.checked_tokens


def test_names_in_a_bundle_neither_control_the_terminal_nor_add_lines(honest: CheckedBundle) -> None:
    hostile = "run\x1b[2J\x9b1A\u202e\nNothing was found that is not as the bundle says."
    node = replace(honest.nodes[0], node=hostile, numerics=hostile)
    lines = list(lines_of(replace(honest, run_name=hostile, nodes=[node])))
    assert len(lines) == len(list(lines_of(honest)))
    assert all(line.isprintable() for line in lines)


def test_a_share_is_chosen_by_the_checkers_seed(bundle: Path) -> None:
    first, again, other = (checked(bundle, share=0.3, seed=seed) for seed in (1, 1, 2))
    assert 0 < first.chosen < 0.6 * first.rollouts
    assert first.checked_tokens == again.checked_tokens != other.checked_tokens
    assert named(first) == named(other) == []


def trained(bundle: Path, *, at: int = 5) -> BundledRollout:
    """Return a rollout with at least three tokens that a step has trained on."""
    from echo_hub.bundles.reading import Bundle

    found = [
        one
        for block in Bundle.open(bundle).groups()
        for group in block
        for one in group.rollouts
        if one.state is ReceiptState.TRAINED and one.payload is not None and len(one.payload.completion_ids) >= 3
    ]
    return found[at]


def with_payload(rollout_id: str, change: Callable[[BundledRollout], BundledRollout]) -> Change:
    def of_group(group: BundledGroup) -> BundledGroup:
        return replace(
            group, rollouts=tuple(change(one) if one.rollout_id == rollout_id else one for one in group.rollouts)
        )

    return of_group


def with_ids(*places: int) -> Callable[[BundledRollout], BundledRollout]:
    """Return a change that replaces tokens at these positions."""

    def change(one: BundledRollout) -> BundledRollout:
        assert one.payload is not None
        ids = one.payload.completion_ids.copy()
        ids[list(places)] = (ids[list(places)] + 3) % 10
        return replace(one, payload=replace(one.payload, completion_ids=ids))

    return change


def test_a_changed_token_and_another_key_are_found(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    target = trained(bundle)
    forged = changed(bundle, tmp_path / "forged", STRANGER, groups=with_payload(target.rollout_id, with_ids(0)))
    found = checked(forged, hub_key=fingerprint(hub_key.public_key))
    assert (DiscrepancyKind.KEY, "manifest.json") in named(found)
    assert found.key == fingerprint(STRANGER.public_key)
    draw, *others = found.discrepancies.of(DiscrepancyKind.DRAW)
    assert draw.place == f"rollout {target.rollout_id}" and "goes on after its stop token" in draw.text
    (draw,) = others
    assert draw.place == f"rollout {target.rollout_id}" and "nats outside of the interval" in draw.text


def test_a_handwritten_rollout_is_found_under_the_hubs_own_key(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    target = trained(bundle)
    assert target.payload is not None

    def rewrite(one: BundledRollout) -> BundledRollout:
        assert one.payload is not None
        ids = one.payload.completion_ids.copy()
        ids[:-1] = (ids[:-1] + np.arange(1, len(ids))) % 10
        spans = tuple(replace(span, node_id="invented") for span in one.payload.spans)
        return replace(one, node="invented", payload=replace(one.payload, completion_ids=ids, spans=spans))

    def to_nodes(content: bytes) -> bytes:
        return content + json.dumps({"node": "invented", "numerics": ["torch", "f32", "cpu"]}).encode() + b"\n"

    forged = changed(
        bundle,
        tmp_path / "forged",
        hub_key,
        groups=with_payload(target.rollout_id, rewrite),
        files={"nodes.jsonl": to_nodes},
    )
    found = checked(forged, hub_key=fingerprint(hub_key.public_key))
    assert not found.discrepancies.of(DiscrepancyKind.KEY)
    assert f"rollout {target.rollout_id}" in [one.place for one in found.discrepancies.of(DiscrepancyKind.DRAW)]
    verdicts = {one.node: one for one in found.nodes}
    assert verdicts["hub"].verdict == "honest"
    assert verdicts["invented"].far >= 1
    assert any("not as the bundle says" in line for line in lines_of(found))


def test_a_node_that_forges_all_its_tokens_is_convicted(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    """The forged tokens are those of another rollout. Each token is honest by itself, but does not fit this rollout's
    random numbers."""

    def of_group(group: BundledGroup) -> BundledGroup:
        payloads = [one.payload for one in group.rollouts]
        if group.step is None or any(payload is None for payload in payloads):
            return group
        rollouts = []
        for one, other in zip(group.rollouts, [*payloads[1:], payloads[0]], strict=True):
            assert other is not None
            spans = tuple(replace(span, node_id="swapper") for span in other.spans)
            rollouts.append(
                replace(
                    one,
                    node="swapper",
                    num_tokens=len(other.completion_ids),
                    payload=replace(other, spans=spans),
                )
            )
        return replace(group, rollouts=tuple(rollouts))

    def to_nodes(content: bytes) -> bytes:
        return content + json.dumps({"node": "swapper", "numerics": ["llama_cpp", "q8_0", "cpu"]}).encode() + b"\n"

    forged = changed(bundle, tmp_path / "forged", hub_key, groups=of_group, files={"nodes.jsonl": to_nodes})
    found = checked(forged)
    verdicts = {one.node: one for one in found.nodes}
    assert verdicts["swapper"].verdict == "forged" and verdicts["swapper"].nats >= verdicts["swapper"].alarm_nats
    assert (DiscrepancyKind.DRAW, "node swapper") in named(found)
    (convicted,) = [one for one in found.discrepancies.of(DiscrepancyKind.DRAW) if one.place == "node swapper"]
    assert "do not follow from the lease's seed" in convicted.text and "Most clearly" in convicted.text


def cut(one: BundledRollout, *, finish_reason: FinishReason) -> BundledRollout:
    """Return the rollout with its first two tokens alone."""
    assert one.payload is not None
    payload = replace(
        one.payload,
        completion_ids=one.payload.completion_ids[:2],
        behavior_logprobs=one.payload.behavior_logprobs[:2],
        spans=(replace(one.payload.spans[0], num_tokens=2),),
        finish_reason=finish_reason,
    )
    return replace(one, num_tokens=2, payload=payload)


def test_completions_that_were_cut_are_found(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    """All tokens of a completion that a forger has cut follow from the seed."""
    ends = dict(zip((trained(bundle, at=3).rollout_id, trained(bundle, at=4).rollout_id), FinishReason, strict=True))

    def of_group(group: BundledGroup) -> BundledGroup:
        rollouts = [
            cut(one, finish_reason=ends[one.rollout_id]) if one.rollout_id in ends else one for one in group.rollouts
        ]
        return replace(group, rollouts=tuple(rollouts))

    found = checked(changed(bundle, tmp_path / "forged", hub_key, groups=of_group))
    texts = {one.place: one.text for one in found.discrepancies.of(DiscrepancyKind.DRAW)}
    assert texts.keys() == {f"rollout {rollout_id}" for rollout_id in ends}
    stopped, too_short = texts.values()
    assert "without a stop token" in stopped and "cut at its length. (2 tokens)" in too_short


def test_a_changed_reward_is_found(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    target = trained(bundle, at=9)
    assert target.reward is not None
    other = target.reward + 0.5
    forged = changed(
        bundle,
        tmp_path / "forged",
        hub_key,
        groups=with_payload(target.rollout_id, lambda one: replace(one, reward=other)),
    )
    found = checked(forged)
    (reward,) = found.discrepancies.of(DiscrepancyKind.REWARD)
    assert reward.place == f"rollout {target.rollout_id}" and str(other) in reward.text
    assert "mean reward" in found.discrepancies.of(DiscrepancyKind.RECORD)[0].text


def test_a_changed_prompt_is_found(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(group: BundledGroup) -> BundledGroup:
        if group.group_id != 2:
            return group
        return replace(group, prompt_ids=group.prompt_ids[::-1].copy())

    found = checked(changed(bundle, tmp_path / "forged", hub_key, groups=change))
    assert (DiscrepancyKind.PROMPT, "group 2") in named(found)


@pytest.mark.parametrize("byte", [-1, -4])
def test_a_changed_byte_of_the_steps_adapter_is_found(
    bundle: Path, hub_key: Identity, tmp_path: Path, byte: int
) -> None:
    """The last byte holds the exponent of the last weight, the fourth last its lowest bits."""

    def change(content: bytes) -> bytes:
        content = bytearray(content)
        content[byte] ^= 1
        return bytes(content)

    name = f"adapters/v{STEPS:06d}/adapter_model.safetensors"
    forged = changed(bundle, tmp_path / "forged", hub_key, files={name: change})
    found = checked(forged, repeats_step=True)
    assert named(found) == [(DiscrepancyKind.STEP, f"step {STEPS}")]
    assert found.step is not None and found.step.changed == 1
    assert f"1 of {found.step.weights} weights" in found.discrepancies.of(DiscrepancyKind.STEP)[0].text


def test_a_checkpoint_that_is_not_the_version_before_is_found(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(content: bytes) -> bytes:
        content = bytearray(content)
        content[-1] ^= 1
        return bytes(content)

    name = f"checkpoints/step-{STEPS - 1:06d}/adapter_model.safetensors"
    found = checked(changed(bundle, tmp_path / "forged", hub_key, files={name: change}), repeats_step=True)
    assert (DiscrepancyKind.STEP, f"checkpoint of step {STEPS - 1}") in named(found)


def test_another_seed_of_the_run_is_found(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["settings"]["run"]["seed"] += 1

    forged = changed(bundle, tmp_path / "forged", hub_key, files={"run.json": lambda content: in_json(content, change)})
    found = checked(forged, share=0.0)
    assert found.discrepancies.counts[DiscrepancyKind.RECORD] == found.groups


def test_a_file_that_differs_ends_the_check(bundle: Path, tmp_path: Path) -> None:
    forged = changed(bundle, tmp_path / "forged", STRANGER)
    (forged / "steps.jsonl").write_bytes(b"{}\n")
    found = checked(forged)
    assert named(found) == [(DiscrepancyKind.FILE, "steps.jsonl")]
    assert "so nothing else was checked" in "\n".join(lines_of(found))


def test_another_base_model_is_refused(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="not the base model"):
        checked(bundle, base="builtin:small")


def test_a_task_of_somebodys_own_code_is_not_run(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["settings"]["task"]["name"] = "python:tests.echo_hub.bundles.no_such_module:make"

    forged = changed(bundle, tmp_path / "forged", hub_key, files={"run.json": lambda content: in_json(content, change)})
    found = checked(forged, share=0.1)
    assert "--run-task-code" in found.not_scored and found.rewards is None and named(found) == []
    tried = checked(forged, share=0.1, runs_own_code=True)
    assert "cannot be made here" in tried.not_scored


def test_episodes_of_sessions_are_not_played_again(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["settings"]["task"] |= {"name": "textarena:GuessTheNumber-v0", "options": {}}

    forged = changed(bundle, tmp_path / "forged", hub_key, files={"run.json": lambda content: in_json(content, change)})
    found = checked(forged, share=0.1)
    assert "has state" in found.not_scored and found.rewards is None


def test_a_batch_that_is_not_whole_is_not_repeated(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(group: BundledGroup) -> BundledGroup:
        if group.step != STEPS:
            return group
        return replace(group, rollouts=tuple(replace(one, payload=None) for one in group.rollouts))

    found = checked(changed(bundle, tmp_path / "forged", hub_key, groups=change), repeats_step=True)
    assert found.step is not None and "its batch is not whole" in found.step.cannot
    assert found.without_tokens == 24 and named(found) == []


def test_settings_that_are_not_valid_are_refused(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["settings"]["sampling"]["temperature"] = -1

    forged = changed(bundle, tmp_path / "forged", hub_key, files={"run.json": lambda content: in_json(content, change)})
    with pytest.raises(CodecError, match=r"sampling\.temperature"):
        checked(forged)


def test_a_bundle_without_the_base_models_weights_is_refused(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["base"] = {name: found for name, found in value["base"].items() if not name.endswith(".safetensors")}

    assert any(path.suffix == ".safetensors" for path in resolve_base("builtin:tiny").iterdir())
    forged = changed(bundle, tmp_path / "forged", hub_key, files={"run.json": lambda content: in_json(content, change)})
    with pytest.raises(CodecError, match="names no weights"):
        checked(forged)
