import pytest

from echo_hub.net import nonces
from echo_hub.net.nonces import VALID_S, Nonces
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import Hello


def hello(number: int) -> Hello:
    return Hello(protocol_version=8, software_version="1", node_key=number.to_bytes(32), nonce=bytes(32))


ALICE, BOB = hello(1), hello(2)


def code(nonce: bytes, made_for: Hello, book: Nonces, now: float) -> str:
    with pytest.raises(RefusedError) as caught:
        book.check(nonce, made_for, now=now)
    return caught.value.code


def test_a_nonce_is_valid_for_a_while_and_for_one_hello() -> None:
    book = Nonces()
    nonce = book.make(ALICE, now=100.0)
    assert len(nonce) == 32 and nonce != book.make(ALICE, now=100.0)
    book.check(nonce, ALICE, now=100.0)
    book.check(nonce, ALICE, now=99.99 + VALID_S)
    assert code(nonce, ALICE, book, 100.01 + VALID_S) == "stale_proof"
    assert code(nonce, BOB, book, 100.0) == "stale_proof"
    assert code(nonce, ALICE.model_copy(update={"nonce": b"\1" * 32}), book, 100.0) == "stale_proof"
    assert code(nonce, ALICE, Nonces(), 100.0) == "stale_proof", "another process has another secret"


def test_a_process_with_the_same_secret_accepts_the_nonce() -> None:
    nonce = Nonces(bytes(32)).make(ALICE, now=100.0)
    other = Nonces(bytes(32))
    other.check(nonce, ALICE, now=100.0)
    other.use(nonce, now=100.0)
    assert code(nonce, ALICE, other, 100.0) == "stale_proof"


@pytest.mark.parametrize("place", [0, 8, 16, 31])
def test_no_byte_of_a_nonce_can_be_changed(place: int) -> None:
    book = Nonces()
    nonce = bytearray(book.make(ALICE, now=100.0))
    nonce[place] ^= 1
    assert code(bytes(nonce), ALICE, book, 100.0) == "stale_proof"


def test_a_nonce_can_be_used_once() -> None:
    book = Nonces()
    first, second = book.make(ALICE, now=100.0), book.make(ALICE, now=100.0)
    book.use(first, now=110.0)
    assert code(first, ALICE, book, 111.0) == "stale_proof"
    with pytest.raises(RefusedError):
        book.use(first, now=111.0)
    book.check(second, ALICE, now=111.0)


def test_used_nonces_are_remembered_until_they_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonces, "MOST_USED", 3)
    book = Nonces()
    made = [book.make(ALICE, now=100.0) for _ in range(4)]
    for nonce in made[:3]:
        book.use(nonce, now=101.0)
    with pytest.raises(RefusedError) as caught:
        book.use(made[3], now=102.0)
    assert caught.value.code == "too_soon"
    assert code(made[0], ALICE, book, 102.0) == "stale_proof"
    book.use(book.make(ALICE, now=200.0), now=200.0)
    assert len(book._used) == 1
