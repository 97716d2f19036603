from echo_shared.wire.codec import decode_from_node
from tests.echo_shared.wire.messages.examples import ROLLOUT, changed, plain


def test_fields_that_a_newer_peer_adds_are_ignored() -> None:
    assert plain(decode_from_node(changed(ROLLOUT, colour="blue"))) == plain(ROLLOUT)
