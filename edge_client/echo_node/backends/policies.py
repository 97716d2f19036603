"""The policy versions of a worker process. A thread prepares one while another samples, so that a switch takes no time.

All methods are called on the engine's thread. That thread also frees a dropped version, once its preparation or use has
ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from echo_node.backends.base import Engine, PreparedPolicy
from echo_shared.errors import BackendError
from echo_shared.files.atomic import disk_error


@dataclass(frozen=True, slots=True, eq=False)
class _Policy:
    preparing: Future[PreparedPolicy] | None
    """Preparation of the version's adapter, which runs on the preparing thread; None for the base model without
    adapter.
    """

    @property
    def is_ready(self) -> bool:
        """True if the preparation has ended, with or without success."""
        return self.preparing is None or self.preparing.done()

    @property
    def can_be_used(self) -> bool:
        """True if the preparation succeeded. Requires `is_ready`."""
        return self.preparing is None or (not self.preparing.cancelled() and self.preparing.exception() is None)

    def free(self) -> None:
        if self.preparing is not None and self.can_be_used:
            self.preparing.result().free()


class EnginePolicies:
    """Policy versions that one engine can use or is preparing. Version 0 is the base model without adapter."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        self._known: dict[int, _Policy] = {0: _Policy(None)}
        self._untold: set[int] = set()
        """Known versions that `take_prepared` has not returned yet."""
        self._dropped: list[_Policy] = []
        """Dropped versions whose adapters are not freed yet."""
        self._used: _Policy | None = None
        self._is_set = False
        """True if the engine samples with the policy `_used`. False after a failed switch to it."""

    def add(self, version: int, adapter_dir: Path | None) -> None:
        """Make a new version known, and start to prepare its adapter. `adapter_dir` None: the base model without
        adapter.
        """
        preparing = None if adapter_dir is None else self._thread.submit(self._prepare, adapter_dir)
        self._known[version] = _Policy(preparing)
        self._untold.add(version)

    def _prepare(self, adapter_dir: Path) -> PreparedPolicy:
        try:
            return self._engine.prepare(adapter_dir)
        except OSError as error:
            what = "A policy cannot be converted for the engine."
            raise disk_error(what, adapter_dir.parent, got=str(error), code=error.errno) from error

    def drop(self, version: int) -> None:
        """Forget a version. Its adapter is freed once nothing uses it."""
        policy = self._known.pop(version, None)
        self._untold.discard(version)
        if policy is not None and policy.preparing is not None:
            policy.preparing.cancel()
            self._dropped.append(policy)
        self._free_dropped()

    def is_ready(self, version: int) -> bool:
        """Return True if `use` of the version would not wait. `use` may still fail."""
        policy = self._known.get(version)
        return policy is None or policy.is_ready

    def take_prepared(self) -> list[int]:
        """Return the usable versions that have become ready since the last call, ascending."""
        ready = sorted(version for version in self._untold if self._known[version].is_ready)
        self._untold -= set(ready)
        return [version for version in ready if self._known[version].can_be_used]

    def wait(self, versions: Iterable[int], timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until one of these versions is ready. All must be in preparation."""
        wait(
            [preparing for version in versions if (preparing := self._known[version].preparing) is not None],
            timeout=timeout_s,
            return_when=FIRST_COMPLETED,
        )

    def use(self, version: int) -> None:
        """Make the engine sample with this version; wait for the version's preparation. Raises the BackendError or
        CodecError with which the preparation or the switch failed.
        """
        policy = self._known.get(version)
        if policy is None:
            raise BackendError(
                "A group names a policy version that this worker does not have.",
                got=str(version),
                code="unknown_policy",
            )
        if policy is not self._used or not self._is_set:
            self._set(policy)

    def use_base(self) -> None:
        """Make the engine sample with the base model without adapter, even if version 0 is unknown."""
        self._set(_Policy(None))

    def _set(self, policy: _Policy) -> None:
        prepared = None if policy.preparing is None else policy.preparing.result()
        self._is_set = False
        self._engine.set_policy(prepared)
        self._used, self._is_set = policy, True
        self._free_dropped()

    def close(self) -> None:
        """End the thread. Close the engine next, which frees the prepared adapters."""
        self._thread.shutdown(cancel_futures=True)

    def _free_dropped(self) -> None:
        if not self._is_set:
            return  # A switch has failed: the engine may still use any of the dropped adapters.
        done = [policy for policy in self._dropped if policy.is_ready and policy is not self._used]
        self._dropped = [policy for policy in self._dropped if policy not in done]
        for policy in done:
            policy.free()
