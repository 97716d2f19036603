"""Limits of each tenant: tokens a day, open requests, models, sessions, and bytes of weights and results. Pure: `now`
is an argument.

A quota is spent when the tokens used today reach it. The prompts and training data of open requests count as used.
Open requests still end, so a day may exceed the quota by their drawn tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from echo_hub.tenants.refusal import Refusal, RefusalKind

DAY_S: Final = 86_400.0
MAX_SESSIONS: Final = 256
"""Largest number of open sessions of one tenant. It may open this number at once; after that, one every `SESSION_S`."""
SESSION_S: Final = 5.0
"""Seconds between two new sessions of a tenant that has opened many. Each leaves rows in the database for a day."""
KEPT_DAYS: Final = 4
"""Number of days whose used tokens are remembered: those that were counted last. If the clock is set forward and back,
no day's count is lost.
"""
_SOON_S: Final = 1.0
"""Delay in seconds before a tenant with too many open requests or sessions should ask again."""
_LATER_S: Final = 60.0
"""Delay in seconds before a tenant with too many stored results should ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may use; 0 = no limit, for the limits that allow it."""

    tokens_per_day: int = 0
    max_queued: int = 4_096
    max_models: int = 16
    max_checkpoint_bytes: int = 0
    max_result_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Open:
    tenant_id: str
    tokens: int


def day_of(now: float) -> int:
    """Return the number of the day (UTC) since the epoch."""
    return int(now // DAY_S)


class Quotas:
    """Limits and usage of all tenants. All methods that check raise Refusal."""

    def __init__(self, limits: TenantLimits) -> None:
        """`limits` apply to tenants without limits of their own."""
        self._limits = limits
        self._own: Mapping[str, TenantLimits] = {}
        self.result_bytes: Mapping[str, int] = {}
        """Bytes of each tenant's stored results, at the last count."""
        self._used = OrderedDict[int, Counter[str]]()
        """For each day: the tokens that each tenant has used. The day that was counted last is at the end."""
        self._open: dict[str, _Open] = {}
        """Open requests by id."""
        self._num_open = Counter[str]()
        self._certain = Counter[str]()
        """For each tenant: tokens that its open requests use in any case, such as their prompts."""
        self._sessions: dict[str, tuple[float, float]] = {}
        """For each tenant: number of sessions that it may open at once, and time (`elapsed`) of its last opening."""

    def restore(self, used: Mapping[str, int], *, now: float) -> None:
        """Take over from the database the tokens that tenants have used today."""
        self._used = OrderedDict({day_of(now): Counter(used)})

    def change(self, own: Mapping[str, TenantLimits]) -> None:
        """Replace the limits that apply to single tenants."""
        self._own = own

    def limits_of(self, tenant_id: str) -> TenantLimits:
        return self._own.get(tenant_id, self._limits)

    def used(self, tenant_id: str, *, now: float) -> int:
        """Return the tokens that the tenant has used today."""
        of_day = self._used.get(day_of(now))
        return 0 if of_day is None else of_day[tenant_id]

    def num_open(self, tenant_id: str) -> int:
        return self._num_open[tenant_id]

    def check(self, tenant_id: str, *, now: float) -> None:
        """Raise Refusal (QUOTA_SPENT or TOO_MANY) if the tenant may not send a request now."""
        limits = self.limits_of(tenant_id)
        if self._num_open[tenant_id] >= limits.max_queued:
            raise Refusal(
                RefusalKind.TOO_MANY,
                "You have too many open requests.",
                got=f"{self._num_open[tenant_id]:,} of {limits.max_queued:,}",
                do="Wait until some are done, and ask again.",
                retry_after_s=_SOON_S,
            )
        stored = self.result_bytes.get(tenant_id, 0)
        if 0 < limits.max_result_bytes <= stored:
            raise Refusal(
                RefusalKind.TOO_MANY,
                "Your stored results take too much disk space.",
                got=f"{stored:,} of {limits.max_result_bytes:,} bytes",
                do="Read the results of your requests, and ask again: results that were read are deleted.",
                retry_after_s=_LATER_S,
            )
        used, certain = self.used(tenant_id, now=now), self._certain[tenant_id]
        if limits.tokens_per_day and used + certain >= limits.tokens_per_day:
            raise Refusal(
                RefusalKind.QUOTA_SPENT,
                "Your tokens of today are used up."
                if used >= limits.tokens_per_day
                else "Your open requests need the rest of your tokens of today.",
                got=f"{used:,} used, {certain:,} in open requests, of {limits.tokens_per_day:,}",
                do="Continue after midnight UTC, or ask the hub's operator for more.",
                retry_after_s=(day_of(now) + 1) * DAY_S - now,
            )

    @contextmanager
    def accepting(self, tenant_id: str, request_id: str, tokens: int, *, now: float) -> Iterator[None]:
        """Check a new request and count it at once, so that simultaneous requests see it. If the block raises, the
        request no longer counts."""
        self.check(tenant_id, now=now)
        self.begin(tenant_id, request_id, tokens)
        try:
            yield
        except BaseException:
            self.end(request_id, 0, now=now)
            raise

    def begin(self, tenant_id: str, request_id: str, tokens: int) -> None:
        """Count an open request that uses `tokens` in any case. A known id is ignored."""
        if request_id not in self._open:
            self._open[request_id] = _Open(tenant_id, tokens)
            self._num_open[tenant_id] += 1
            self._certain[tenant_id] += tokens

    def end(self, request_id: str, tokens: int, *, now: float) -> None:
        """Count a request as ended, with the `tokens` that it used. A cancelled or failed request may have used fewer
        than expected. An unknown id is ignored, so nothing counts twice."""
        was = self._open.pop(request_id, None)
        if was is None:
            return
        for counter, change in ((self._num_open, 1), (self._certain, was.tokens)):
            counter[was.tenant_id] -= change
            if not counter[was.tenant_id]:
                del counter[was.tenant_id]
        self._used.setdefault(day_of(now), Counter())[was.tenant_id] += tokens
        self._used.move_to_end(day_of(now))
        if len(self._used) > KEPT_DAYS:
            self._used.popitem(last=False)

    def check_session(self, tenant_id: str, num_open: int, *, elapsed: float) -> None:
        """Raise Refusal if a tenant with `num_open` sessions may open no further one; else count it. `elapsed`:
        seconds of a clock that never jumps."""
        free, since = self._sessions.get(tenant_id, (float(MAX_SESSIONS), elapsed))
        free = min(float(MAX_SESSIONS), free + (elapsed - since) / SESSION_S)
        if num_open < MAX_SESSIONS and free < 1.0:
            raise Refusal(
                RefusalKind.TOO_MANY,
                "You open sessions too fast.",
                got=f"more than {MAX_SESSIONS} at once, and one every {SESSION_S:.0f} s",
                do="Use one session for several models and samplers.",
                retry_after_s=SESSION_S,
            )
        if num_open >= MAX_SESSIONS:
            raise Refusal(
                RefusalKind.TOO_MANY,
                "You have too many open sessions.",
                got=f"{num_open:,} of {MAX_SESSIONS:,}",
                do="End programs that you no longer need; their sessions end with them.",
                retry_after_s=_SOON_S,
            )
        self._sessions[tenant_id] = (free - 1.0, elapsed)

    def check_model(self, tenant_id: str, num_models: int) -> None:
        """Raise Refusal if a tenant with `num_models` models in training may make no further one."""
        limit = self.limits_of(tenant_id).max_models
        if num_models >= limit:
            raise Refusal(
                RefusalKind.FORBIDDEN,
                "You have too many models in training.",
                got=f"{num_models:,} of {limit:,}",
                do="End sessions that you no longer need: their models end with them.",
            )

    def check_bytes(self, tenant_id: str, saved: int, more: int = 0) -> None:
        """Raise Refusal if a tenant whose saved weights take `saved` bytes may not save `more` bytes."""
        limit = self.limits_of(tenant_id).max_checkpoint_bytes
        if limit and saved + more > limit:
            raise Refusal(
                RefusalKind.FORBIDDEN,
                "Your saved weights take too much disk space.",
                got=f"{saved:,} bytes are saved, {more:,} more are needed, {limit:,} are allowed",
                do="Delete weights that you no longer need, or save with a ttl.",
            )
