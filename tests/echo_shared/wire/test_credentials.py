import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.errors import RemoteProtocolError
from echo_shared.wire.credentials import MOST_CHARACTERS, Credentials, challenge_header, challenge_of

FRAMES = st.binary(min_size=1, max_size=600)


@given(FRAMES, FRAMES, FRAMES)
def test_credentials_are_read_back_unchanged(hello: bytes, nonce: bytes, proof: bytes) -> None:
    for credentials in (Credentials(hello=hello), Credentials(hello=hello, nonce=nonce, proof=proof)):
        assert Credentials.of_header(credentials.header()) == credentials
    assert challenge_of(challenge_header(hello)) == hello


def test_golden_headers() -> None:
    assert Credentials(hello=b"\xff\xfe?").header() == "Echo hello=__4_"
    both = "Echo hello=aA, nonce=bm4, proof=cHJv"
    assert Credentials(hello=b"h", nonce=b"nn", proof=b"pro").header() == both
    assert challenge_header(b"c") == "Echo challenge=Yw"


@pytest.mark.parametrize("header", ["", "Basic YTpi", "Bearer hello=aA", "Echoes hello=aA"])
def test_headers_of_other_schemes_are_ignored(header: str) -> None:
    assert Credentials.of_header(header) is None and challenge_of(header) is None


@pytest.mark.parametrize(
    "header",
    [
        "Echo",
        "Echo ",
        "Echo hello",
        "Echo hello=a",
        "Echo hello=a=",
        "Echo hello=ü",
        "Echo hello=aA, hello=aA",
        "Echo hello=aA, proof=aA",
        "Echo proof=aA, nonce=aA",
        "Echo hello=aA, more=aA",
        "Echo hello=aA,, nonce=aA",
        "Echo hello=" + "a" * MOST_CHARACTERS,
    ],
)
def test_broken_credentials_are_the_peers_error(header: str) -> None:
    with pytest.raises(RemoteProtocolError):
        Credentials.of_header(header)


@given(st.text(max_size=60))
def test_hostile_headers_raise_no_other_error(rest: str) -> None:
    for read in (Credentials.of_header, challenge_of):
        with contextlib.suppress(RemoteProtocolError):
            read(f"Echo {rest}")


def test_the_scheme_is_read_in_any_case() -> None:
    assert Credentials.of_header("ECHO hello=aA") == Credentials(hello=b"h")
