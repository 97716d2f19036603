"""Cut and join the routes of completions (`Completion.routes`): B bytes for each token, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from echo_shared.wire.messages import NO_ROUTE, Completion


def bytes_per_token(completion: Completion) -> int:
    """Return the number B of bytes of one token's route; 0 without routes. The routes must fit the completion."""
    return len(completion.routes) // max(1, len(completion.completion_ids))


def fit(completion: Completion) -> bool:
    """Return True if the routes have equally many bytes for each token, or are empty."""
    count = len(completion.completion_ids)
    return not completion.routes or (count > 0 and len(completion.routes) % count == 0)


def routes_of(completion: Completion, count: int) -> bytes:
    """Return the routes of the first `count` tokens; b"" for routes that do not fit the completion."""
    return completion.routes[: count * bytes_per_token(completion)] if fit(completion) else b""


def own_routes(completion: Completion, num_given: int) -> bytes:
    """Return the routes without those of the first `num_given` tokens, which another node computed. Routes that do not
    fit the completion stay as they are.
    """
    if not num_given or not fit(completion):
        return completion.routes
    given = min(num_given, len(completion.completion_ids)) * bytes_per_token(completion)
    return bytes([NO_ROUTE]) * given + completion.routes[given:]


def joined_routes(turns: Sequence[tuple[Completion, int]]) -> bytes:
    """Return the routes of all turns of an episode. Each turn is followed by a number of tokens without route. Turns
    without routes get unknown ones; if no turn has routes, or turns differ in B, the result is empty.
    """
    sizes = {bytes_per_token(turn) for turn, _ in turns if turn.routes}
    if len(sizes) != 1:
        return b""
    (size,) = sizes
    nothing = bytes([NO_ROUTE]) * size
    return b"".join((turn.routes or nothing * len(turn.completion_ids)) + nothing * unseen for turn, unseen in turns)
