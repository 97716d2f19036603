"""The operator's pages of completions: /rollouts, a searchable list, and /rollouts/GROUP, one prompt with all its
rollouts.

As JSON: /api/v1/rollouts and /api/v1/rollouts/GROUP, with the same query. Both pages work without scripts. Every list
and group has its own address. Completions are untrusted: they are escaped and keep their own text direction, and
invisible or reordering characters are shown as visible signs (`visible`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final, Protocol
from urllib.parse import urlencode

import jinja2
from aiohttp import web

from echo_hub.dashboard.episodes import episodes_of
from echo_hub.dashboard.responses import html_response, json_response, whole_number
from echo_hub.dashboard.templating import Template
from echo_hub.dashboard.token_marks import Colour, legend, marks, summary_of
from echo_shared.records.rollout import GroupView, RolloutFilter, RolloutsPage
from echo_shared.wire.messages import Checked, DropReason, ReceiptState

ROWS_SHOWN: Final = 50
MOST_ROWS: Final = 500
MAX_TEXT: Final = 200
"""Longest search text, in characters."""
MOST_TURNS: Final = 80
"""Largest number of turns for which the page of a group shows all episodes. If there are more, it shows a single
episode."""

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "state": tuple(state.value for state in ReceiptState),
    "drop": tuple(reason.value for reason in DropReason),
    "check": tuple(checked.value for checked in Checked),
}
"""Allowed values of the query fields that have a fixed list of values."""


class RolloutsSource(Protocol):
    async def page(self, wanted: RolloutFilter, *, before: str, limit: int) -> RolloutsPage: ...

    async def group(
        self, group_id: int, *, episode: int | None = None, most: int | None = None
    ) -> GroupView | None: ...


class WrongQueryError(ValueError):
    """An invalid query value, described for the page."""


def filter_of(query: Mapping[str, str]) -> RolloutFilter:
    """Parse the query of an address or a command. Empty values mean no condition. Raises WrongQueryError."""
    found: dict[str, Any] = {}
    for field in fields(RolloutFilter):
        given = query.get(field.name, "").strip() if field.name != "text" else query.get("text", "")
        if given:
            found[field.name] = _value(field.name, given)
    return RolloutFilter(**found)


def _value(name: str, given: str) -> int | float | str:
    if name in CHOICES:
        if given not in CHOICES[name]:
            raise WrongQueryError(f"{name} must be one of: {', '.join(CHOICES[name])}; not {given[:40]!r}")
        return given
    if name in ("node", "text"):
        if len(given) > MAX_TEXT or "\0" in given:  # PostgreSQL rejects NUL in texts.
            raise WrongQueryError(f"{name} must be at most {MAX_TEXT} characters, without NUL")
        return given
    if name in ("reward_min", "reward_max"):
        try:
            reward = float(given)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise WrongQueryError(f"{name} must be a number, such as 0.5; not {given[:40]!r}")
        return reward
    number = whole_number(given)
    if number is None:
        raise WrongQueryError(f"{name} must be a whole number: 0, 1, 2, ...; not {given[:40]!r}")
    return number


def place_of(query: Mapping[str, str]) -> str:
    """Return the rollout id below which the list continues; "" means that it begins with the newest. Raises
    WrongQueryError."""
    given = query.get("before", "")
    lease, _, index = given.partition("-")
    if given and (whole_number(lease) is None or whole_number(index) is None):
        raise WrongQueryError(f"before must be a rollout's id, such as 12-3; not {given[:40]!r}")
    return given


def asked(wanted: RolloutFilter) -> dict[str, str]:
    """Return the query fields of the page address that lists the rollouts of this filter."""
    return {name: str(value) for name, value in asdict(wanted).items() if value not in (None, "")}


class RolloutsRoom:
    def __init__(self, source: RolloutsSource, templates: jinja2.Environment) -> None:
        self._source = source
        self._list = Template(templates, "rollouts.html")
        self._group = Template(templates, "rollout_group.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/rollouts", self.serve),
            web.get("/rollouts/{group}", self.serve_group),
            web.get("/api/v1/rollouts", self.serve_json),
            web.get("/api/v1/rollouts/{group}", self.serve_group_json),
        ]

    async def serve(self, request: web.Request) -> web.Response:
        """GET /rollouts"""
        try:
            wanted, before = filter_of(request.query), place_of(request.query)
        except WrongQueryError as error:
            return self._rendered_list(request, RolloutFilter(), None, wrong=str(error))
        page = await self._source.page(wanted, before=before, limit=ROWS_SHOWN)
        return self._rendered_list(request, wanted, page, is_first=not before)

    def _rendered_list(
        self,
        request: web.Request,
        wanted: RolloutFilter,
        page: RolloutsPage | None,
        *,
        wrong: str = "",
        is_first: bool = True,
    ) -> web.Response:
        query = asked(wanted)
        text = self._list.render(
            room="rollouts",
            wanted=wanted,
            page=page,
            wrong=wrong,
            choices=CHOICES,
            is_asked=bool(query),
            newest="" if is_first else f"/rollouts?{urlencode(query)}".rstrip("?"),
            older=f"/rollouts?{urlencode({**query, 'before': page.before})}" if page and page.before else "",
            as_json=f"/api/v1/rollouts?{urlencode(query)}".rstrip("?"),
        )
        return html_response(text, status=400 if wrong else 200)

    async def serve_group(self, request: web.Request) -> web.Response:
        """GET /rollouts/{group}?colour=logprob|version|none&episode=INDEX"""
        colours: tuple[Colour, ...] = ("logprob", "version", "none")
        chosen = request.query.get("colour", "")
        colour = next((known for known in colours if known == chosen), colours[0])
        group = await self._find(request, episode=whole_number(request.query.get("episode", "")), most=MOST_TURNS)
        if group is None:
            raise web.HTTPNotFound(text="There is no such group, or its rollouts were deleted.")
        versions = sorted({piece.version for each in group.rollouts if each.drawn for piece in each.drawn.pieces})
        drawn = {each.summary.rollout_id: each.drawn for each in group.rollouts if each.drawn}
        text = self._group.render(
            room="rollouts",
            group=group,
            episodes=episodes_of(group),
            colour=colour,
            colours=colours,
            legend=legend(colour, versions),
            marked={rollout: marks(each, colour, versions) for rollout, each in drawn.items()},
            summaries={rollout: summary_of(each) for rollout, each in drawn.items()},
        )
        return html_response(text)

    async def serve_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/rollouts: `RolloutsPage`. For older rollouts, ask again with its `before`."""
        try:
            wanted, before = filter_of(request.query), place_of(request.query)
            limit = whole_number(request.query.get("limit", str(ROWS_SHOWN)))
            if limit is None or not 1 <= limit <= MOST_ROWS:
                raise WrongQueryError(f"limit must be 1 to {MOST_ROWS}")
        except WrongQueryError as error:
            return json_response({"error": str(error)}, status=400)
        return json_response(await self._source.page(wanted, before=before, limit=limit))

    async def serve_group_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/rollouts/{group}: `GroupView`"""
        group = await self._find(request)
        if group is None:
            return json_response({"error": "there is no such group, or its rollouts were deleted"}, status=404)
        return json_response(group)

    async def _find(
        self, request: web.Request, *, episode: int | None = None, most: int | None = None
    ) -> GroupView | None:
        group_id = whole_number(request.match_info["group"])
        return None if group_id is None else await self._source.group(group_id, episode=episode, most=most)
