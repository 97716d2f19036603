from echo_shared.wire.codec import decode_from_hub
from echo_shared.wire.messages import Refused
from echo_shared.wire.messages.fields import printable_line
from tests.echo_shared.wire.messages.examples import changed


def test_control_characters_of_a_peer_never_reach_a_terminal() -> None:
    refused = decode_from_hub(changed(Refused(code="x", what="No."), what="\x1b[2Jcleared\nline"))
    assert isinstance(refused, Refused)
    assert refused.what == "?[2Jcleared\nline"
    refused = decode_from_hub(changed(refused, what="\u202eback\u2066\u200b\u2028\tend", code="a\nb\tc\x9b"))
    assert isinstance(refused, Refused)
    assert (refused.what, refused.code) == ("?back???\tend", "a?b?c?")
    assert printable_line("\ud800\r\nÄ 字 🙂") == "???Ä 字 🙂"
