"""Encryption in the age format, read by pyrage, the implementation that tinker-cookbook decrypts with."""

import io
import subprocess

import pytest

from echo_hub.tenants.refusal import Refusal
from echo_hub.tinker.age import CHUNK_BYTES, encrypted, public_key
from tests.doors import doors_python

KEYS = "import pyrage; one = pyrage.x25519.Identity.generate(); print(one, one.to_public())"
DECRYPT = """import sys, pyrage
sys.stdout.buffer.write(pyrage.decrypt(sys.stdin.buffer.read(), [pyrage.x25519.Identity.from_str(sys.argv[1])]))"""


@pytest.fixture(scope="module")
def key() -> tuple[str, str]:
    answer = subprocess.run([doors_python(), "-c", KEYS], check=True, capture_output=True, text=True)
    secret, public = answer.stdout.split()
    return secret, public


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_file_opens_with_its_key(key, size):
    secret, public = key
    other = "age1zvkyg2lqzraa2lnjvqej32nkuu0ues2s82hzrye869xeexvn73equnujwj"  # Key from the format's documentation.
    data = bytes(index % 251 for index in range(size))
    closed = b"".join(encrypted(io.BytesIO(data), [other, public]))
    opened = subprocess.run([doors_python(), "-c", DECRYPT, secret], input=closed, check=True, capture_output=True)
    assert opened.stdout == data


@pytest.mark.parametrize("recipient", ["", "age1", "ssh-ed25519 AAAA", "age1" + "q" * 58, "äge1" + "q" * 58])
def test_other_recipients_are_refused(recipient):
    with pytest.raises(Refusal, match="age_encryption_recipients"):
        public_key(recipient)


def test_a_key_with_one_wrong_character_is_refused(key):
    public = key[1]
    wrong = public[:10] + ("q" if public[10] != "q" else "p") + public[11:]
    with pytest.raises(Refusal):
        public_key(wrong)
