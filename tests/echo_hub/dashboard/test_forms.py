from __future__ import annotations

import re
from typing import Any

from aiohttp.test_utils import make_mocked_request

from echo_hub.dashboard.forms import FormTokens


def test_a_page_has_its_viewers_own_token_and_a_scripts_has_none(guard: Any) -> None:
    forms, others = FormTokens(guard), FormTokens(guard)
    assert forms.slot != others.slot
    cookie = guard.begin_session(make_mocked_request("GET", "/login")).cookies
    (morsel,) = cookie.values()
    mine = make_mocked_request("GET", "/", headers={"Cookie": f"{morsel.key}={morsel.value}"})
    shown = forms.personal(mine)(f"a {forms.slot} b {others.slot}")
    (token,) = re.fullmatch(rf"a ([0-9a-f]+) b {others.slot}", shown).groups()  # type: ignore[union-attr]
    assert guard.session(mine).is_form_token(token)
    assert forms.personal(make_mocked_request("GET", "/"))(f"a {forms.slot}") == "a "
