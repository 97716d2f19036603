"""The run as a bundle, checked as a stranger would check it, by the commands `echo-hub bundle` and `echo-hub
check-bundle`.

The first check reads the honest bundle. The second reads a copy with one forgery of each kind, signed with the hub's
own key, so the hub itself is the forger. A forgery counts as found if the check names its place. In a third copy,
somebody without the key has changed one byte of an adapter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from benchmarks.harness.engine import group_request
from benchmarks.harness.forging import Change, changed
from benchmarks.real.engines import TrainedRun
from echo_hub.bundles.blocks import BundledGroup, BundledRollout
from echo_hub.bundles.checking import is_chosen
from echo_hub.bundles.discrepancies import DiscrepancyKind
from echo_hub.bundles.layout import STEPS, adapter_path
from echo_hub.bundles.reading import Bundle
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_shared.delta.adapter import WEIGHTS_FILE
from echo_shared.sampling.torch_sampler import sample_groups
from echo_shared.signing import key_file
from echo_shared.wire.messages import ReceiptState

SHARE: Final = 0.03
HEADLINE: Final = ("honest_named", "step_is_same", "forgeries", "forgeries_found")
TIMEOUT_S: Final = 900
LEAST_TOKENS: Final = 3
"""Minimum number of tokens of a completion that is chosen for a forgery."""
Found = Sequence[Mapping[str, Any]]
"""The discrepancies in the report of `check-bundle --json`, one map each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgery:
    """One planted forgery, and the place that a check must name."""

    name: str
    kind: DiscrepancyKind
    place: str
    groups: Change | None = None
    files: Mapping[str, Callable[[bytes], bytes]] = field(default_factory=dict)

    def text(self, found: Found) -> str:
        """Return the text of the discrepancy at the forgery's place; "" if the check found none there."""
        return next((one["text"] for one in found if (one["kind"], one["place"]) == (self.kind, self.place)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgeryTarget:
    """A rollout that is to be forged, with its group."""

    group: BundledGroup
    rollout: BundledRollout


def measured(trained: TrainedRun, policy: Policy, scratch: Path, seed: int) -> dict[str, Any]:
    """Check the honest bundle and both forged copies. Return sizes and times, and how many of the forgeries the checks
    found.
    """
    scratch.mkdir(parents=True)
    run, base = trained.directory, trained.config.model.base
    honest, step = scratch / "honest", trained.version
    began = time.monotonic()
    echo_hub("bundle", run.root, honest, "--step", step)
    bundle_s = time.monotonic() - began
    found, seconds = _checked(honest, base, seed)
    bundle = Bundle.open(honest)
    other = bundle.adapters[min(bundle.adapters)]
    forgeries = planted(bundle, trained.settings, policy, other=other, share=SHARE, seed=seed, step=step)
    forged = changed(
        honest,
        scratch / "forged",
        key_file.load(run.key),
        groups=all_of(forgeries),
        files={name: change for one in forgeries for name, change in one.files.items()},
    )
    named, _ = _checked(forged, base, seed)
    unsigned = _with_a_changed_byte(forged, step)
    files, _ = _checked(unsigned, base, seed)
    texts = {one.name: one.text(named["discrepancies"]) for one in forgeries}
    texts["a byte of an adapter, unsigned"] = next(
        (one["text"] for one in files["discrepancies"] if one["kind"] == DiscrepancyKind.FILE), ""
    )
    return {
        "bundle_mb": sum(path.stat().st_size for path in honest.rglob("*") if path.is_file()) / 1e6,
        "bundle_s": bundle_s,
        "check_s": seconds,
        "checked_rollouts": found["checked_rollouts"],
        "checked_tokens": found["checked_tokens"],
        "honest_named": len(found["discrepancies"]),
        "step_is_same": found["step"] is not None and found["step"]["is_same"],
        "forgeries": len(texts),
        "forgeries_found": sum(map(bool, texts.values())),
        "found": texts,
    }


def planted(
    bundle: Bundle, settings: LearnerSettings, policy: Policy, *, other: Path, share: float, seed: int, step: int
) -> list[Forgery]:
    """Return one forgery of each kind. The forgeries are in different rollouts, chosen by a check with this `share` and
    `seed`.

    `other` is the adapter of a version that did not draw the newest rollouts. The check repeats `step`, so no forged
    rollout is in its batch.
    """
    possible = [one for one in _victims(bundle, share=share, seed=seed) if one.group.step != step]
    recorded = possible[-1].group.step
    victims = (one for one in possible if one.group.step != recorded)
    redrawn, drawn = _drawn_by(policy.read_adapter(other), victims, settings, policy)
    handwritten, rewarded, removed = (next(victims) for _ in range(3))
    reward = rewarded.rollout.reward
    assert reward is not None and recorded is not None
    return [
        Forgery(
            name="a draw of another version",
            kind=DiscrepancyKind.DRAW,
            place=f"rollout {redrawn.rollout.rollout_id}",
            groups=_with(redrawn, drawn),
        ),
        Forgery(
            name="a handwritten completion",
            kind=DiscrepancyKind.DRAW,
            place=f"rollout {handwritten.rollout.rollout_id}",
            groups=_with(handwritten, _handwritten(handwritten)),
        ),
        Forgery(
            name="an edited reward",
            kind=DiscrepancyKind.REWARD,
            place=f"rollout {rewarded.rollout.rollout_id}",
            groups=_with(rewarded, replace(rewarded.rollout, reward=1.0 - reward)),
        ),
        Forgery(
            name="a removed lease",
            kind=DiscrepancyKind.RECORD,
            place="rollouts in the bundle",
            groups=_with(removed, None),
        ),
        Forgery(
            name="an edited record of a step",
            kind=DiscrepancyKind.RECORD,
            place=f"step {recorded}",
            files={STEPS: lambda content: _edited(content, recorded)},
        ),
        Forgery(
            name="a bit of the repeated step's adapter",
            kind=DiscrepancyKind.STEP,
            place=f"step {step}",
            files={_weights_path(step): lambda content: content[:-4] + bytes([content[-4] ^ 1]) + content[-3:]},
        ),
    ]


def _victims(bundle: Bundle, *, share: float, seed: int) -> list[ForgeryTarget]:
    """Return one rollout of each trained group, the newest steps first, from those that a check with this `share` and
    `seed` chooses. All tokens of such a rollout come from one version, and the bundle has this version's adapter.
    """
    versions = {0, *bundle.adapters}
    found: list[ForgeryTarget] = []
    for group in (group for groups in bundle.groups() for group in groups):
        for one in group.rollouts:
            drawn_by = set() if one.payload is None else {span.policy_version for span in one.payload.spans}
            if (
                one.state is ReceiptState.TRAINED
                and len(drawn_by) == 1
                and drawn_by <= versions
                and (one.num_tokens or 0) >= LEAST_TOKENS
                and is_chosen(one.rollout_id, share=share, seed=seed)
            ):
                found.append(ForgeryTarget(group=group, rollout=one))
                break
    return sorted(found, key=lambda victim: victim.group.step or 0, reverse=True)


def _drawn_by(
    weights: Mapping[str, Tensor], victims: Iterator[ForgeryTarget], settings: LearnerSettings, policy: Policy
) -> tuple[ForgeryTarget, BundledRollout]:
    """Sample the victims again with other weights, until a completion differs from the original. Return this victim,
    and the forged rollout that replaces it.
    """
    for victim in victims:
        group, one = victim.group, victim.rollout
        assert one.payload is not None
        request = group_request(
            group.group_id,
            group.prompt_ids,
            seed=group.seed,
            indices=[one.index],
            max_tokens=settings.max_tokens,
            stop_ids=settings.stop_ids,
            temperature=settings.temperature,
        )
        with policy.holding(weights), policy.autocast():
            (drawn,) = sample_groups(policy.model, [request])
        if not np.array_equal(drawn.completion_ids, one.payload.completion_ids):
            length = len(drawn.completion_ids)
            payload = replace(
                one.payload,
                completion_ids=drawn.completion_ids,
                behavior_logprobs=drawn.behavior_logprobs,
                finish_reason=drawn.finish_reason,
                spans=(replace(one.payload.spans[0], num_tokens=length),),
            )
            return victim, replace(one, payload=payload, num_tokens=length)
    raise RuntimeError("the other version drew every chosen rollout with the same tokens")


def _handwritten(victim: ForgeryTarget) -> BundledRollout:
    """Return the rollout with all its tokens but the last replaced by tokens of its prompt."""
    payload = victim.rollout.payload
    assert payload is not None
    ids = payload.completion_ids.copy()
    ids[:-1] = np.resize(victim.group.prompt_ids, len(ids) - 1)
    return replace(victim.rollout, payload=replace(payload, completion_ids=ids))


def _with(victim: ForgeryTarget, other: BundledRollout | None) -> Change:
    """Return a change that replaces the victim's rollout by `other`, or removes it."""

    def change(group: BundledGroup) -> BundledGroup:
        if group.group_id != victim.group.group_id:
            return group
        wanted = victim.rollout.rollout_id
        rollouts = (other if one.rollout_id == wanted else one for one in group.rollouts)
        return replace(group, rollouts=tuple(one for one in rollouts if one is not None))

    return change


def all_of(forgeries: Sequence[Forgery]) -> Change:
    """Return a change of a bundle's groups that plants all these forgeries, as far as they concern groups."""

    def change(group: BundledGroup) -> BundledGroup:
        for one in forgeries:
            group = group if one.groups is None else one.groups(group)
        return group

    return change


def _edited(content: bytes, step: int) -> bytes:
    """Return the records of all steps, with a higher mean reward in this step."""
    records = [json.loads(line) for line in content.splitlines()]
    edited = [{**one, "mean_reward": one["mean_reward"] + 0.05} if one["step"] == step else one for one in records]
    return b"".join(f"{json.dumps(one)}\n".encode() for one in edited)


def _with_a_changed_byte(bundle: Path, step: int) -> Path:
    path = bundle / _weights_path(step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return bundle


def _weights_path(version: int) -> str:
    return f"{adapter_path(version)}/{WEIGHTS_FILE}"


def _checked(bundle: Path, base: str, seed: int) -> tuple[dict[str, Any], float]:
    """Run `check-bundle`. Return its JSON report, and the seconds that it took."""
    file, began = bundle.with_suffix(".json"), time.monotonic()
    options = ("--base", base, "--share", SHARE, "--seed", seed, "--device", "cpu", "--json", file)
    echo_hub("check-bundle", bundle, *options, allowed=(0, 1))
    return json.loads(file.read_text()), time.monotonic() - began


def echo_hub(*arguments: object, allowed: Sequence[int] = (0,)) -> None:
    command = [sys.executable, "-m", "echo_hub.main", *map(str, arguments)]
    status = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
    if status not in allowed:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}")
