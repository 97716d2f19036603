import socket

from echo_node.host.network import own_addresses


def test_addresses_include_those_that_programs_listen_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[0] in own_addresses()
    assert "192.0.2.77" not in own_addresses()
