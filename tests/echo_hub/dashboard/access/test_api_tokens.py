from __future__ import annotations

from dataclasses import replace

from echo_hub.actions.records import ApiToken, TokenScope
from echo_hub.dashboard.access.api_tokens import MOST_CHARACTERS, ApiTokens, hash_of, new_api_token


def test_a_token_is_found_while_it_is_good_and_never_by_its_hash() -> None:
    secret = new_api_token()
    token = ApiToken(
        token_id=1, name="ci", scope="operate", token_hash=hash_of(secret), created_at=0.0, expires_at=200.0
    )
    tokens = ApiTokens()
    assert tokens.find(secret, 100.0) is None
    tokens.renew([token])
    assert tokens.find(secret, 100.0) == token
    for wrong in ("", secret[:-1], f"{secret}x", token.token_hash, "echo_\ud800", "echo_" + "x" * MOST_CHARACTERS):
        assert tokens.find(wrong, 100.0) is None
    assert tokens.find(secret, 200.0) is None
    tokens.renew([replace(token, revoked_at=50.0)])
    assert tokens.find(secret, 100.0) is None


def test_no_two_tokens_are_alike_and_each_has_256_bits() -> None:
    made = {new_api_token() for _ in range(100)}
    assert len(made) == 100 and all(len(token) == len("echo_") + 43 for token in made)


def test_a_tenant_is_known_by_a_valid_token_of_its_name() -> None:
    def token(name: str, scope: TokenScope, revoked_at: float | None = None) -> ApiToken:
        return ApiToken(
            token_id=1,
            name=name,
            scope=scope,
            token_hash=hash_of(new_api_token()),
            created_at=0.0,
            expires_at=200.0,
            revoked_at=revoked_at,
        )

    tokens = ApiTokens()
    tokens.renew([token("ada", "use", 50.0), token("ada", "use"), token("bob", "use", 50.0), token("ci", "operate")])
    assert [tokens.is_tenant(name, 100.0) for name in ("ada", "bob", "ci", "eve")] == [True, False, False, False]
    assert not tokens.is_tenant("ada", 200.0)
