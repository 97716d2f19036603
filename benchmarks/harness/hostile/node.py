"""`echo-node` with the same commands, but with `engine` as its engine process."""

from __future__ import annotations

import os

from echo_node import main
from echo_node.backends import process

if __name__ == "__main__":
    # The cage (the engine's sandbox) would stop the engine from writing its list of forged rollouts.
    os.environ["ECHO_NODE_CAGE"] = "off"
    vars(process)["WORKER"] = "benchmarks.harness.hostile.engine"
    main.run()
