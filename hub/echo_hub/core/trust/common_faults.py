"""Failures that many nodes share: no node is quarantined for them. Possible causes are a version, a problem, and the
verifier itself. So for each combination of numerics class (kind of engine) and version, and of class and group, this
module counts the nodes that were checked and those that failed. Once `LEAST_FAILED` nodes have failed, and they make up
at least the share `SHARE` of the checked ones, verdicts on this class with this version or group are *suspended*: no
node is quarantined for them, quarantined nodes are released, and the operator is told. Failed rollouts are still not
trained on.

If proven nodes were checked, only their results count, because anyone can create new nodes. If only strangers (unproven
nodes) were checked, all count, so that the first nodes of a class that the verifier judges wrongly are not lost. A
large number of hostile strangers can therefore avoid quarantine; still, all their rollouts are checked before training.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from echo_hub.core.trust.numerics import NumericsClass

LEAST_FAILED: Final = 3
"""Number of nodes that must fail for one cause before verdicts may be suspended."""
SHARE: Final = 0.5
"""Verdicts are suspended if at least this share of the nodes checked for one cause has failed."""
KEPT: Final = 512
"""Number of remembered causes (class with version or group). The cause that was checked longest ago is forgotten
first."""
MOST_NODES: Final = 1_024
"""Maximum number of checked nodes that are counted for one possible cause of failures."""

Cause = tuple[NumericsClass, str, int]
"""Possible common cause of failures: numerics class (kind of engine), "version" or "group", and the version's or
group's number."""


@dataclass(slots=True, eq=False)
class _Count:
    checked: dict[str, bool] = field(default_factory=dict)
    """Checked nodes; True if the node was proven at one of the checks."""
    failed: set[str] = field(default_factory=set)

    @property
    def is_common(self) -> bool:
        voters = {node_id for node_id, is_established in self.checked.items() if is_established} or self.checked.keys()
        failed = len(self.failed & voters)
        return failed >= LEAST_FAILED and failed >= SHARE * len(voters)


class CommonFaults:
    """Counts of checked and failed nodes, by possible common cause of failures. The caller must report every
    verdict."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Cause, _Count] = OrderedDict()

    def note(self, cause: Cause, node_id: str, *, is_established: bool, failed: bool) -> None:
        """Count one checked rollout of the node under this possible cause of a failure. `is_established`: the node was
        proven at that time."""
        count = self._counts.pop(cause, None) or _Count()
        self._counts[cause] = count
        if len(self._counts) > KEPT:
            self._counts.popitem(last=False)
        if node_id in count.checked or len(count.checked) < MOST_NODES:
            count.checked[node_id] = is_established or count.checked.get(node_id, False)
            if failed:
                count.failed.add(node_id)

    def suspended(self, causes: tuple[Cause, ...]) -> Cause | None:
        """Return the first of these causes for which verdicts are suspended, because many nodes fail for it; None:
        there is none."""
        return next((cause for cause in causes if (c := self._counts.get(cause)) is not None and c.is_common), None)

    def failed(self, cause: Cause) -> tuple[str, ...]:
        """Return the nodes that failed checks for this possible cause (`Cause`), sorted."""
        return tuple(sorted(self._counts[cause].failed))

    @property
    def all_suspended(self) -> tuple[Cause, ...]:
        """Return all causes for which verdicts are suspended, because many nodes fail for them, the latest last."""
        return tuple(cause for cause, count in self._counts.items() if count.is_common)
