"""Refusals of tenants' requests. Each of the two APIs turns a kind of refusal into its own HTTP status and body."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from echo_shared.errors import EchoError


class RefusalKind(StrEnum):
    """Reason why a request was refused. The comments give the HTTP status in both APIs."""

    INVALID = "invalid"  # 400: the request can never succeed as it is
    UNAUTHORIZED = "unauthorized"  # 401: no valid token came with the request
    QUOTA_SPENT = "quota_spent"  # 402: the tenant's tokens of the day are used up
    FORBIDDEN = "forbidden"  # 403: another tenant's object, or not allowed
    NOT_FOUND = "not_found"  # 404
    GONE = "gone"  # 410: expired session, sampler or future
    TOO_LARGE = "too_large"  # 413
    TOO_MANY = "too_many"  # 429: the queue of this tenant is full; ask again
    NOT_READY = "not_ready"  # 503: the hub cannot serve now, but will


class Refusal(EchoError):
    """The hub refuses a request. `kind` decides the status; `param` names the wrong option, if there is one."""

    default_code: ClassVar[str] = "refused_tenant"

    def __init__(
        self,
        kind: RefusalKind,
        what: str,
        *,
        got: str | None = None,
        do: str | None = None,
        param: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(what, got=got, do=do)
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s
