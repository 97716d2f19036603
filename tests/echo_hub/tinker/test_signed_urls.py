"""Signed URLs of files: valid, forged and expired signatures."""

from urllib.parse import parse_qs, urlsplit

import pytest

from echo_hub.tinker.signed_urls import UrlSigner


@pytest.mark.parametrize("forged", ["", "\u00e9", "\udc80", "0" * 64])
def test_a_forged_signature_does_not_hold(forged):
    signer = UrlSigner()
    query = parse_qs(urlsplit(signer.query("ada", "tinker://m/external_weights/a", "f", 2**34)).query)
    (expires,), (signature,) = query["expires"], query["signature"]
    assert signer.holds("ada", "tinker://m/external_weights/a", "f", expires, signature)
    assert not signer.holds("ada", "tinker://m/external_weights/a", "f", expires, forged)
    assert not signer.holds("eve", "tinker://m/external_weights/a", "f", expires, signature)
