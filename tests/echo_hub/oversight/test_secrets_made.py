from __future__ import annotations

from echo_hub.actions.requests import MakeInvite, MakeToken, Pause
from echo_hub.dashboard.access.api_tokens import PREFIX
from echo_hub.net.invitations import hash_of
from echo_hub.oversight.secrets_made import secret_of


def test_each_made_token_is_new_and_has_its_hash() -> None:
    for request, prefix in ((MakeInvite(name="Ada"), ""), (MakeToken(name="ci"), PREFIX)):
        (one, one_hash), (other, _) = secret_of(request), secret_of(request)
        assert one != other and one.startswith(prefix) and one_hash == hash_of(one) and len(one) >= 43
    assert secret_of(Pause()) == ("", "")
