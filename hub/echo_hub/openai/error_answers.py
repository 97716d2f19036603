"""Error answers of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

from aiohttp import hdrs, web

from echo_hub.tenants.refusal import Refusal, RefusalKind

_ANSWERS: Final[dict[RefusalKind, tuple[int, str, str]]] = {
    RefusalKind.INVALID: (400, "invalid_request_error", "invalid_value"),
    RefusalKind.UNAUTHORIZED: (401, "authentication_error", "invalid_api_key"),
    RefusalKind.QUOTA_SPENT: (402, "insufficient_quota", "insufficient_quota"),
    RefusalKind.FORBIDDEN: (403, "permission_error", "forbidden"),
    RefusalKind.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    RefusalKind.GONE: (410, "invalid_request_error", "gone"),
    RefusalKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    RefusalKind.TOO_MANY: (429, "rate_limit_error", "rate_limit_exceeded"),
    RefusalKind.NOT_READY: (503, "server_error", "not_ready"),
}
"""HTTP status, `type` and `code` of each refusal."""
RETRY_S: Final = 5.0
"""Value of Retry-After, in seconds, for a refusal that names no time."""
_FRESH: Final = {hdrs.CACHE_CONTROL: "no-store"}


class ContextTooLong(Refusal):
    """The prompt leaves no room for a completion. Clients recognise this error by its code and the words of its
    message."""

    default_code: ClassVar[str] = "context_length_exceeded"

    def __init__(self, *, num_tokens: int, context_tokens: int, param: str, is_least: bool = False) -> None:
        """`is_least` True: `num_tokens` is a lower limit, because the prompt was not counted to its end."""
        super().__init__(
            RefusalKind.INVALID,
            f"This model's maximum context length is {context_tokens} tokens. However, your prompt has"
            f" {'at least ' if is_least else ''}{num_tokens} tokens, and a completion needs at least one.",
            do="Reduce the length of the prompt.",
            param=param,
        )


def error_body(refusal: Refusal) -> dict[str, Any]:
    _, kind, code = _ANSWERS[refusal.kind]
    if refusal.code != Refusal.default_code:
        code = refusal.code
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param or None, "code": code}}


class UnsupportedOption(Refusal):
    """The request has a known option that this hub does not offer. To ignore it would give other samples than asked
    for."""

    default_code: ClassVar[str] = "unsupported_parameter"

    def __init__(self, param: str, *, got: str, do: str) -> None:
        super().__init__(
            RefusalKind.INVALID, f"This hub does not support the option {param!r}.", got=got, do=do, param=param
        )


def error_answer(refusal: Refusal) -> web.Response:
    status = _ANSWERS[refusal.kind][0]
    answer = web.json_response(error_body(refusal), status=status, headers=_FRESH)
    if status in (429, 503):
        wait_s = RETRY_S if refusal.retry_after_s is None else refusal.retry_after_s
        answer.headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(wait_s)))
    return answer


def failed_answer() -> web.Response:
    """Return the answer after an error of the hub itself."""
    return web.json_response(FAILED, status=500, headers=_FRESH)


FAILED: Final = {
    "error": {
        "message": "The hub failed to answer this request; its log says why.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
}
