from __future__ import annotations

from echo_hub.actions.records import SCOPES, ApiToken, is_good_for


def test_a_scope_includes_the_lower_scopes() -> None:
    good = {(one, other) for one in SCOPES for other in SCOPES if is_good_for(one, other)}
    assert good == {
        ("read", "read"),
        ("operate", "read"),
        ("operate", "operate"),
        ("admin", "read"),
        ("admin", "operate"),
        ("admin", "admin"),
    }


def test_a_token_holds_until_it_expires_or_is_revoked() -> None:
    token = ApiToken(token_id=1, name="ci", scope="read", token_hash="0", created_at=0.0, expires_at=10.0)
    assert token.holds(9.9) and not token.holds(10.0)
    revoked = ApiToken(
        token_id=1, name="ci", scope="read", token_hash="0", created_at=0.0, expires_at=10.0, revoked_at=1.0
    )
    assert not revoked.holds(2.0)
