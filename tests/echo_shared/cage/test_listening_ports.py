"""The kernel lists exactly the sockets that listen on a port."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from echo_shared.cage import listening_ports

if sys.platform != "linux":
    pytest.skip("Linux's own", allow_module_level=True)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_the_listening_socket_of_a_port_is_found(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)):
            inode = os.fstat(server.fileno()).st_ino
            assert listening_ports.listening_inodes(port) == set(listening_ports._read(port)) == {inode}
    assert listening_ports.listening_inodes(port) == set()
