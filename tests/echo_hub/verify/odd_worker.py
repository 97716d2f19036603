"""A verifier process that answers at once, but dies of some rollouts, by what their ids say, or cannot begin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from echo_hub.core.trust.evidence import Evidence
from echo_hub.verify.drawn import pack_evidence, unpack
from echo_shared.child import ParentPipe


def serve(pipe: ParentPipe) -> int:
    opening = pipe.receive()
    assert opening is not None
    run_dir = Path(os.environ["ODD_DIRECTORY"])
    with (run_dir / "starts").open("a") as starts:
        starts.write("x")
    if (run_dir / "no_base").exists():
        pipe.send({"failed": "The base model cannot be loaded."})
        return 1
    if (run_dir / "dies_at_once").exists():
        return 3
    pipe.send({"ready": True})
    while (request := pipe.receive()) is not None:
        with (run_dir / "requests").open("a") as requests:
            requests.write(f"{len(request['rollouts'])}\n")
        for frame in request["rollouts"]:
            drawn = unpack(frame)
            if drawn.rollout_id.startswith("deadly"):
                os._exit(9)
            shown = Evidence.of([0.0] * len(drawn.completion_ids), [0.0] * len(drawn.completion_ids))
            pipe.send({"rollout_id": drawn.rollout_id, "spans": pack_evidence((("a", shown),)), "seconds": 0.5})
    return 0


if __name__ == "__main__":
    sys.exit(serve(ParentPipe()))
