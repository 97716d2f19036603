"""`echo-node`, with the same commands, whose engine's process is `engine`."""

from __future__ import annotations

import os

from echo_node import main
from echo_node.backends import process

if __name__ == "__main__":
    os.environ["ECHO_NODE_CAGE"] = "off"  # It writes down what it has forged.
    vars(process)["WORKER"] = "benchmarks.hostile.engine"
    main.run()
