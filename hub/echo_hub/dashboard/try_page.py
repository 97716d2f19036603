"""The operator's page for trying versions: GET /try, a form, and /try/NUMBER, the replies of one or two versions.

No scripts are needed: POST /try begins a trial and redirects to its page, which reloads itself until the trial is over.
One trial runs at a time, in a separate process. The constants `MOST_*` limit prompt, samples and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import jinja2
from aiohttp import web

from echo_hub.dashboard.responses import html_response, see_other, whole_number
from echo_hub.dashboard.templating import Template
from echo_shared.errors import EchoError

MOST_CHARACTERS: Final = 8_000
MOST_SAMPLES: Final = 8
MOST_TOKENS: Final = 2_048
MOST_TEMPERATURE: Final = 5.0
AGAIN_S: Final = 1
"""Seconds after which the page of an unfinished trial reloads itself."""
VERSIONS_OFFERED: Final = 50
GONE: Final = "This trial is gone. Only the newest ones are kept, until the hub ends."

TrialState = Literal["loading", "sampling", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TryRequest:
    prompt: str
    versions: tuple[int, ...]
    """One version or two; 0 = the base model."""
    samples: int
    temperature: float
    """Sampling temperature; 0 = always the likeliest token."""
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class TriedReply:
    """One reply. It grows while it is sampled."""

    text: str = ""
    num_tokens: int = 0
    finish: str = ""
    """"stop" or "length"; "" while the reply is sampled."""


@dataclass(slots=True, kw_only=True)
class PromptTrial:
    """One trial of one or two versions. Only its owner, the `TryDesk`, changes it."""

    number: int
    request: TryRequest
    state: TrialState = "loading"
    detail: str = ""
    """Why the trial was stopped or failed."""
    seconds: float = 0.0
    """Seconds of sampling so far."""
    replies: dict[int, list[TriedReply]] = field(default_factory=dict)
    """The replies so far, by version."""

    @property
    def is_over(self) -> bool:
        return self.state not in ("loading", "sampling")


class TrialRunningError(Exception):
    """Another trial runs. The text says how long it may take."""


class TryDesk(Protocol):
    """Samples the replies of trials. The pages call it; the hub implements it."""

    @property
    def off(self) -> str:
        """Return the reason why no version can be tried now; "" if versions can be tried."""

    @property
    def versions(self) -> Sequence[int]:
        """Return the versions that can be tried, oldest first. Version 0 is the base model."""

    @property
    def usual(self) -> TryRequest:
        """Return a request with the run's own sampling settings and an empty prompt, to fill in the form."""

    def begin(self, asked: TryRequest) -> PromptTrial:
        """Begin a trial. Raises TrialRunningError, and EchoError if it cannot be carried out."""

    def find(self, number: int) -> PromptTrial | None:
        """Return a trial by its number; None if there is none, or if it is too old."""

    def stop(self, number: int) -> None:
        """Stop a trial. Does nothing if the trial has already ended."""


class WrongTrialError(ValueError):
    """A form with an invalid value, described for the page."""


def request_of(form: Mapping[str, object], usual: TryRequest) -> TryRequest:
    """Parse the form. Raises WrongTrialError."""
    prompt = str(form.get("prompt", "")).replace("\r\n", "\n")
    if not prompt.strip():
        raise WrongTrialError("Type a prompt.")
    if len(prompt) > MOST_CHARACTERS:
        raise WrongTrialError(f"The prompt must have at most {MOST_CHARACTERS:,} characters; it has {len(prompt):,}.")
    versions = [_whole(form, name, least=0, most=2**53) for name in ("version", "other") if form.get(name, "") != ""]
    try:
        temperature = float(str(form.get("temperature", usual.temperature)))
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= MOST_TEMPERATURE:
        raise WrongTrialError(f"The temperature must be a number from 0 to {MOST_TEMPERATURE:g}.")
    if not versions:
        raise WrongTrialError("Choose a version.")
    return TryRequest(
        prompt=prompt,
        versions=tuple(dict.fromkeys(versions)),
        samples=_whole(form, "samples", least=1, most=MOST_SAMPLES),
        temperature=temperature,
        max_tokens=_whole(form, "max_tokens", least=1, most=MOST_TOKENS),
    )


def _whole(form: Mapping[str, object], name: str, *, least: int, most: int) -> int:
    number = whole_number(str(form.get(name, "")))
    if number is None or not least <= number <= most:
        raise WrongTrialError(f"{name.replace('_', ' ')} must be a whole number from {least} to {most}.")
    return number


class TryRoom:
    def __init__(self, desk: TryDesk | None, templates: jinja2.Environment) -> None:
        self._desk = desk
        self._template = Template(templates, "try.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/try", self.serve),
            web.post("/try", self.begin),
            web.get("/try/{number}", self.serve_trial),
            web.post("/try/{number}/stop", self.stop),
        ]

    async def serve(self, _request: web.Request) -> web.Response:
        """GET /try"""
        return self._page()

    async def begin(self, request: web.Request) -> web.Response:
        """POST /try"""
        if self._desk is None or self._desk.off:
            return self._page(status=409)
        form = await request.post()
        usual = self._desk.usual
        try:
            asked = request_of(form, usual)
        except WrongTrialError as error:
            return self._page(wrong=str(error), typed=form, status=400)
        try:
            trial = self._desk.begin(asked)
        except TrialRunningError as error:
            return self._page(wrong=str(error), typed=form, status=409)
        except EchoError as error:
            return self._page(wrong=str(error), typed=form, status=400)
        return see_other(f"/try/{trial.number}")

    async def serve_trial(self, request: web.Request) -> web.Response:
        """GET /try/{number}"""
        trial = self._find(request)
        if trial is None:
            return self._page(wrong=GONE, status=404)
        return self._page(trial=trial)

    async def stop(self, request: web.Request) -> web.Response:
        """POST /try/{number}/stop"""
        trial = self._find(request)
        if trial is None or self._desk is None:
            return self._page(wrong=GONE, status=404)
        self._desk.stop(trial.number)
        return see_other(f"/try/{trial.number}")

    def _find(self, request: web.Request) -> PromptTrial | None:
        number = whole_number(request.match_info["number"])
        return None if number is None or self._desk is None else self._desk.find(number)

    def _page(
        self,
        *,
        trial: PromptTrial | None = None,
        wrong: str = "",
        typed: Mapping[str, object] | None = None,
        status: int = 200,
    ) -> web.Response:
        off = "This page is not part of this hub." if self._desk is None else self._desk.off
        versions = () if self._desk is None or off else self._desk.versions
        text = self._template.render(
            room="try",
            off=off,
            wrong=wrong,
            trial=trial,
            again_s=AGAIN_S if trial is not None and not trial.is_over else 0,
            versions=list(versions)[::-1][:VERSIONS_OFFERED],
            shown=_shown(trial, typed, None if self._desk is None else self._desk.usual),
            most_characters=MOST_CHARACTERS,
            most_samples=MOST_SAMPLES,
            most_tokens=MOST_TOKENS,
            most_temperature=MOST_TEMPERATURE,
        )
        return html_response(text, status=status)


def _shown(trial: PromptTrial | None, typed: Mapping[str, object] | None, usual: TryRequest | None) -> dict[str, str]:
    """Return the values for the form: what the operator typed, else the trial's values, else the run's usual values."""
    names = ("prompt", "version", "other", "samples", "temperature", "max_tokens")
    if typed is not None:
        return {name: str(typed.get(name, "")) for name in names}
    request = trial.request if trial is not None else usual
    if request is None:
        return dict.fromkeys(names, "")
    versions = [str(version) for version in request.versions]
    return {
        "prompt": request.prompt,
        "version": versions[0] if versions else "",
        "other": versions[1] if len(versions) > 1 else "",
        "samples": str(request.samples),
        "temperature": f"{request.temperature:g}",
        "max_tokens": str(request.max_tokens),
    }
