"""The page for trying versions, without scripts and without a model: its form, its limits, and the replies that it
shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import ClientSession

from echo_hub.dashboard.try_page import (
    MOST_CHARACTERS,
    MOST_SAMPLES,
    MOST_TOKENS,
    PromptTrial,
    TrialRunningError,
    TriedReply,
    TryRequest,
    WrongTrialError,
    request_of,
)
from echo_shared.errors import ConfigError

USUAL = TryRequest(prompt="", versions=(7, 0), samples=2, temperature=0.7, max_tokens=64)
FORM = {
    "prompt": "What is 2 + 2?",
    "version": "7",
    "other": "0",
    "samples": "2",
    "temperature": "0.7",
    "max_tokens": "64",
}
HOSTILE = '</pre><script>alert("owned")</script>\x1b[2J\u202e'


class ScriptedDesk:
    """An operator's desk that records requests. If `error` is set, the next request raises it."""

    def __init__(self) -> None:
        self.off = ""
        self.versions: Sequence[int] = (0, 6, 7)
        self.usual = USUAL
        self.error: Exception | None = None
        self.trial: PromptTrial | None = None
        self.stopped: list[int] = []

    def begin(self, asked: TryRequest) -> PromptTrial:
        if self.error is not None:
            raise self.error
        self.trial = PromptTrial(number=5, request=asked)
        return self.trial

    def find(self, number: int) -> PromptTrial | None:
        return self.trial if number == 5 else None

    def stop(self, number: int) -> None:
        self.stopped.append(number)


@pytest.fixture
def desk() -> ScriptedDesk:
    return ScriptedDesk()


@pytest.fixture
async def hub(open_hub: Any, make_source: Any, desk: ScriptedDesk) -> ClientSession:
    session: ClientSession = await open_hub(make_source(step=3), trials=desk)
    return session


async def post(hub: ClientSession, path: str, form: dict[str, str]) -> tuple[int, str]:
    async with hub.post(path, data=form, allow_redirects=False) as answer:
        return answer.status, answer.headers.get("Location") or await answer.text()


async def get(hub: ClientSession, path: str, status: int = 200) -> str:
    async with hub.get(path) as answer:
        assert answer.status == status
        return await answer.text()


async def test_the_form_offers_the_versions_and_the_run_s_settings(hub: ClientSession) -> None:
    page = await get(hub, "/try")
    assert (
        '<option value="7" selected>version 7</option>' in page
        and '<option value="0" selected>base model</option>' in page
    )
    assert 'name="temperature" type="number" min="0" max="5.0" step="any" value="0.7"' in page
    assert "http-equiv" not in page and 'href="/try" aria-current="page"' in page


async def test_a_trial_begins_and_its_page_loads_itself_until_it_is_over(
    hub: ClientSession, desk: ScriptedDesk
) -> None:
    assert await post(hub, "/try", FORM) == (303, "/try/5")
    trial = desk.trial
    assert trial is not None and trial.request == TryRequest(
        prompt="What is 2 + 2?", versions=(7, 0), samples=2, temperature=0.7, max_tokens=64
    )
    page = await get(hub, "/try/5")
    assert '<meta http-equiv="refresh" content="1">' in page and "being loaded" in page and "Stop" in page
    assert 'name="prompt"' not in page, "a page that loads itself again would lose what is typed"
    assert await post(hub, "/try/5/stop", {}) == (303, "/try/5") and desk.stopped == [5]
    trial.state, trial.seconds = "done", 1.25
    trial.replies = {
        7: [TriedReply(text="4", num_tokens=2, finish="stop")],
        0: [TriedReply(text="5", num_tokens=64, finish="length")],
    }
    page = await get(hub, "/try/5")
    assert "http-equiv" not in page and "Done in 1.2 s" in page and "64 tokens, cut off" in page
    assert ">What is 2 + 2?</textarea>" in page


async def test_untrusted_text_is_only_text(hub: ClientSession, desk: ScriptedDesk) -> None:
    await post(hub, "/try", {**FORM, "prompt": HOSTILE})
    assert desk.trial is not None
    desk.trial.state, desk.trial.detail = "failed", HOSTILE
    desk.trial.replies = {7: [TriedReply(text=HOSTILE, num_tokens=9)]}
    page = await get(hub, "/try/5")
    assert "<script>alert" not in page and page.count("⟨U+202E⟩") == 3
    assert page.count("\u202e") == 1, "only in the field, where it can be sent again unchanged"


async def test_refusals_keep_what_was_typed(hub: ClientSession, desk: ScriptedDesk) -> None:
    for error, status in (
        (TrialRunningError("Trial 4 is running."), 409),
        (ConfigError("No such version."), 400),
    ):
        desk.error = error
        answered, page = await post(hub, "/try", FORM)
        assert answered == status and str(error) in page and ">What is 2 + 2?</textarea>" in page
    answered, page = await post(hub, "/try", {**FORM, "samples": "99"})
    assert answered == 400 and f"samples must be a whole number from 1 to {MOST_SAMPLES}" in page


async def test_an_unknown_trial_is_not_found(hub: ClientSession) -> None:
    assert "This trial is gone" in await get(hub, "/try/6", status=404)
    assert (await post(hub, "/try/x/stop", {}))[0] == 404


async def test_only_the_operator_tries(open_hub: Any, make_source: Any, desk: ScriptedDesk) -> None:
    hub = await open_hub(make_source(step=3), trials=desk, token="")
    for path in ("/try", "/try/5"):
        async with hub.get(path) as answer:
            assert answer.status == 401
    assert (await post(hub, "/try", FORM))[0] == 401 and desk.trial is None


async def test_a_page_that_is_off_says_so(open_hub: Any, make_source: Any, desk: ScriptedDesk) -> None:
    desk.off = "This page is off."
    hub = await open_hub(make_source(step=3), trials=desk)
    page = await get(hub, "/try")
    assert "This page is off." in page and "<textarea" not in page
    assert (await post(hub, "/try", FORM))[0] == 409 and desk.trial is None
    assert "not part of this hub" in await get(await open_hub(make_source(step=3)), "/try")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": "  "}, "Type a prompt"),
        ({"prompt": "x" * (MOST_CHARACTERS + 1)}, "at most 8,000 characters"),
        ({"version": ""}, None),
        ({"version": "", "other": ""}, "Choose a version"),
        ({"version": "newest"}, "version must be a whole number"),
        ({"samples": "0"}, "samples must be"),
        ({"max_tokens": str(MOST_TOKENS + 1)}, "max tokens must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"temperature": "nan"}, "temperature must be"),
        ({"temperature": "-1"}, "temperature must be"),
    ],
)
def test_the_form_s_bounds(changed: dict[str, str], said: str | None) -> None:
    if said is None:
        assert request_of({**FORM, **changed}, USUAL).versions == (0,)
        return
    with pytest.raises(WrongTrialError, match=said):
        request_of({**FORM, **changed}, USUAL)


def test_the_same_version_twice_is_sampled_once() -> None:
    assert request_of({**FORM, "other": "7"}, USUAL).versions == (7,)
