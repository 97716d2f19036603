"""`echo-node` with the same commands, but with `paced_engine` as its engine process."""

from __future__ import annotations

from echo_node import main
from echo_node.backends import process

if __name__ == "__main__":
    vars(process)["WORKER"] = "benchmarks.capacity.paced_engine"
    main.run()
