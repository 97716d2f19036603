"""Fixtures that the cage's tests take from the node's tests: a stand-in for NVIDIA's driver, and a local service."""

from tests.echo_node.conftest import _compiled_stub as _compiled_stub
from tests.echo_node.conftest import service as service
from tests.echo_node.conftest import stub_cuda as stub_cuda
