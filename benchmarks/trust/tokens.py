"""Forged tokens and claims, by class of numerics: how many rollouts a hostile node returns before its quarantine.

Each class (backend and precision) has its own hub, with proven honest nodes of the class, and with hostile nodes of the
class, a few at a time. All nodes are `echo-node` processes with real engines. Hostile nodes falsify the results
(`harness.hostile`) and list the forged rollouts. Then the honest nodes work alone until they have returned
`HONEST_ROLLOUTS` more rollouts.

Columns of an attack:

- `to_detection` counts the node's rollouts from its first forged one to its quarantine; `forged_to_detection` counts
  the forged ones among them. A node that re-rolls for reward forges few rollouts once the model is good.
- `trained` counts the rollouts of all nodes that steps consumed from the first forged rollout to the detection, or to
  the end of an undetected attack. `forged_trained` counts the forged ones among them.
- `trained_after` and `forged_trained_after` count the same from the detection until the end of the class's run.
- `fleet_share` is the node's share of all rollouts until its detection. Each hostile node is one of five nodes of about
  equal speed; in a larger fleet it poisons a smaller share.

Headline `poisoned_share_trained` is the sum of `forged_trained` over the sum of `trained`, over all attacks that forge.
`poisoned_share_trained_after` is the same for the columns `..._after`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.engine import lacks
from benchmarks.harness.hostile.engine import FALSIFICATIONS
from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.site import RunningNode, Site, ended, merged, open_site
from benchmarks.trust.loads import ELSEWHERE, SETTINGS
from echo_hub.config.sections import TrustConfig
from echo_hub.config.training_sections import TrainingConfig

HONEST: Final = "honest"
GIVES_BACK: Final = "failures only"
"""An attack that forges nothing: it returns correct rollouts as failed. Other nodes then sample them from the same
seeds, token for token. It counts as detected when the hub has counted `RETURNED` returned rollouts: the node then rests
(gets no work for a while), twice as long each time.
"""
RETURNED: Final = 4
ROLLOUTS: Final = 256
"""Number of rollouts after which a hostile node that the hub has not detected counts as undetected."""
WITHIN_S: Final = 150.0
SLOWLY: Final = {"training": {"learning_rate": TrainingConfig().learning_rate / 4}}
"""Setting for a quarter of the default learning rate. All attacks on a class of numerics (backend and precision)
together take some 400 steps. At the default rate the model would be sure of its tokens after 80 steps, so forgeries
would hardly matter.
"""
WARM_UP_STEPS: Final = 3
WARM_UP_S: Final = 600.0
HONEST_ROLLOUTS: Final = 10_000
STEADY_FROM: Final = TrustConfig().first_checked / TrustConfig().least_checked
"""Number of verified rollouts after which the checked share of a node's rollouts stays constant."""
HONEST_WITHIN_S: Final = 900.0
HONEST_NODES: Final = 2
AT_ONCE: Final = 3
VERIFIER: Final = "echo_hub.verify.worker"
LEARNER: Final = "echo_hub.learner.serve"
LOOK_S: Final = 0.25
CASE_SECONDS: Final = 24.0
HONEST_SECONDS: Final = 90.0
_SUMS: Final = ("forged_trained", "trained", "forged_trained_after", "trained_after")


PRECISIONS: Final = ("f32", "f16", "q8_0", "q4_k_m")
"""Precisions of llama.cpp's weights that are measured. Nodes of one precision round alike and are judged alike."""


def _options(precision: str) -> tuple[str, ...]:
    return ("--backend", "llama_cpp", "--precision", precision)


def _case(precision: str, attack: str) -> str:
    return f"{precision}, {attack}"


def _attacks(precision: str) -> tuple[str, ...]:
    """Return the attacks for nodes of this precision. Nodes with half precision cannot be detected if they claim
    float32, because a float32 engine may keep its cache in half precision.
    """
    as_fine = ("claims to be float32",) if precision in ("f32", "f16") else ()
    return tuple(one for one in FALSIFICATIONS if one != HONEST and one not in as_fine)


def plan() -> list[Planned]:
    planned = []
    for precision in PRECISIONS:
        missing = lacks("llama_cpp", precision)
        planned += [
            Planned(name=_case(precision, attack), seconds=CASE_SECONDS, lacks=missing)
            for attack in _attacks(precision)
        ]
        planned.append(Planned(name=_case(precision, HONEST), seconds=HONEST_SECONDS, lacks=missing))
    return planned


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """Measure the wanted attacks and the honest nodes of each precision, one row for each."""
    rows = []
    for precision in PRECISIONS:
        attacks = [attack for attack in _attacks(precision) if progress.wants(_case(precision, attack))]
        if attacks or progress.wants(_case(precision, HONEST)):
            settings = merged(SETTINGS, {**SLOWLY, "run": {"seed": seed}})
            with open_site(scratch / f"tokens-{precision}", settings) as site:
                honest = [site.node(_options(precision), within=ELSEWHERE) for _ in range(HONEST_NODES)]
                site.wait_for_step(WARM_UP_STEPS, within_s=WARM_UP_S)
                rows += _attacked(site, precision, attacks, progress)
                if progress.wants(_case(precision, HONEST)):
                    rows.append(_honest(site, precision, honest))
                    progress.done(_case(precision, HONEST), {"rollouts": rows[-1]["rollouts"]})
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst figures over all classes. Shares are sums over all attacks."""
    attacked = [row for row in rows if "forged" in row]
    honest = [row for row in rows if "false_bans" in row]
    found: dict[str, Any] = {}
    if attacked:
        total = {name: sum(row[name] for row in attacked if row["forged"]) for name in _SUMS}
        found["worst_rollouts_to_detection"] = max(row["to_detection"] for row in attacked)
        found["worst_forged_to_detection"] = max(row["forged_to_detection"] for row in attacked)
        found["poisoned_share_trained"] = total["forged_trained"] / max(1, total["trained"])
        found["poisoned_share_trained_after"] = total["forged_trained_after"] / max(1, total["trained_after"])
    if honest:
        found["false_bans"] = sum(row["false_bans"] for row in honest)
        found["verification_share"] = max(row["verification_share"] for row in honest)
    return found


def _attacked(site: Site, precision: str, attacks: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
    waiting, over = list(reversed(attacks)), []
    running: dict[str, tuple[RunningNode, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            attack = waiting.pop()
            running[attack] = (site.node(_options(precision), attack=attack, within=ELSEWHERE), time.monotonic())
        time.sleep(LOOK_S)
        for attack, (node, began_at) in list(running.items()):
            row = _row(site, _case(precision, attack), node, time.time())
            seconds = time.monotonic() - began_at
            if row["detected"] or row["rollouts"] >= ROLLOUTS or seconds > WITHIN_S or node.process.poll() is not None:
                del running[attack]
                with ended(node.process):
                    pass
                over.append((_case(precision, attack), node, time.time(), seconds))
                progress.done(row["case"], {key: row[key] for key in ("detected", "to_detection", "forged_trained")})
    return [{**_row(site, case, node, ended_at), "seconds": seconds} for case, node, ended_at, seconds in over]


def _row(site: Site, case: str, node: RunningNode, ended_at: float) -> dict[str, Any]:
    """Read an attack's figures from the database. `ended_at` is the time when an undetected attack ended."""
    found = site.rows("SELECT node_id FROM nodes WHERE name = ?", node.name)
    node_id = found[0][0] if found else ""
    state = site.rows("SELECT state, since, reason, num_checked FROM trust WHERE node_id = ?", node_id)
    standing, since, reason, checked = state[0] if state else ("unknown", 0.0, "", 0)
    detected = standing == "quarantined"
    if case.endswith(GIVES_BACK):
        query = "SELECT count(*) FROM rollouts WHERE node_id = ? AND drop_reason = 'returned'"
        (returned,) = site.rows(query, node_id)[0]
        detected, since, reason = returned >= RETURNED, ended_at, f"{returned} were given back."
    received = site.rows(
        "SELECT lease_id || '-' || \"index\", received_at, planned_at FROM rollouts"
        " JOIN groups USING (group_id) LEFT JOIN steps ON steps.step = groups.step AND state != 'dropped'"
        " WHERE node_id = ? AND received_at IS NOT NULL ORDER BY received_at",
        node_id,
    )
    forged_ids = set(node.forged.read_text().split())
    forged = [one for one in received if one[0] in forged_ids]
    counted = received if case.endswith(GIVES_BACK) else forged
    first_at, over_at = counted[0][1] if counted else ended_at, since if detected else ended_at
    until = [at for _, at, _ in received if first_at <= at <= over_at]
    consumed = [at for _, _, at in forged if at is not None]
    (count,) = site.rows("SELECT count(*) FROM rollouts WHERE received_at BETWEEN ? AND ?", first_at, over_at)[0]
    return {
        "case": case,
        "detected": detected,
        "to_detection": len(until),
        "forged_to_detection": sum(at <= over_at for _, at, _ in forged),
        "rollouts": len(received),
        "checked": checked,
        "forged": len(forged),
        "fleet_share": len(until) / max(1, count),
        "trained": _trained(site, first_at, over_at),
        "forged_trained": sum(at <= over_at for at in consumed),
        "trained_after": _trained(site, over_at, time.time()) if detected else 0,
        "forged_trained_after": sum(at > over_at for at in consumed) if detected else 0,
        "how": reason if detected else standing,
    }


def _trained(site: Site, begin: float, end: float) -> int:
    """Return the number of rollouts in the batches of all steps planned after `begin` and not after `end`, both in
    seconds since the epoch. A step trains on its whole batch.
    """
    query = "SELECT coalesce(sum(num_rollouts), 0) FROM steps WHERE planned_at > ? AND planned_at <= ?"
    return int(site.rows(query, begin, end)[0][0])


def _honest(site: Site, precision: str, honest: Sequence[RunningNode]) -> dict[str, Any]:
    """Wait until all honest nodes are checked at the lowest rate, then for `HONEST_ROLLOUTS` more rollouts. Raises
    RunFailed.

    During these last rollouts, `verifier_ms` and `learner_ms` are processor times per rollout, and `verification_share`
    is their ratio. All other columns are of the whole run.
    """
    names = [node.name for node in honest]
    of_them = f"JOIN nodes USING (node_id) WHERE nodes.name IN ({', '.join('?' for _ in names)})"

    def first(query: str) -> int:
        return int(site.rows(f"{query} {of_them}", *names)[0][0] or 0)

    def returned() -> int:
        return first("SELECT sum(received_at IS NOT NULL) FROM rollouts")

    fewest = "SELECT min(num_verified) FROM trust"
    site.wait_until(lambda: first(fewest) >= STEADY_FROM, within_s=HONEST_WITHIN_S)
    begun, before = returned(), {module: site.processor_s(module) for module in (VERIFIER, LEARNER)}
    site.wait_until(lambda: returned() >= begun + HONEST_ROLLOUTS, within_s=HONEST_WITHIN_S)
    spent = {module: site.processor_s(module) - before[module] for module in (VERIFIER, LEARNER)}
    since = returned() - begun
    checks = dict(site.rows(f"SELECT checked, count(*) FROM rollouts {of_them} GROUP BY checked", *names))
    return {
        "case": _case(precision, HONEST),
        "rollouts": returned(),
        "checked": checks.get("passed", 0) + checks.get("failed", 0),
        "failed": checks.get("failed", 0),
        "false_bans": first("SELECT sum(state = 'quarantined') FROM trust"),
        "verifier_ms": spent[VERIFIER] / since * 1e3,
        "learner_ms": spent[LEARNER] / since * 1e3,
        "verification_share": spent[VERIFIER] / spent[LEARNER],
    }
