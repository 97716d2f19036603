import stat
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from echo_shared.errors import ConfigError
from echo_shared.signing import key_file


def test_a_key_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "dir" / "identity.key"
    first = key_file.load_or_create(path)
    assert key_file.load_or_create(path).public_key == first.public_key == key_file.load(path).public_key
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_an_invalid_key_file_is_named_in_the_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "identity.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"identity\.key"):
        key_file.load(path)


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    pem = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "k").write_bytes(pem)
    with pytest.raises(ConfigError, match="wrong type"):
        key_file.load(tmp_path / "k")
