"""A stub of a verifier process, without a model. It dies when it gets a rollout named `deadly...`, or when it must
measure the rounding `deadly` (only the first process dies) or `fatal` (every process dies). The files `no_base` and
`dies_at_once` in its directory keep it from starting.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from echo_hub.core.trust.evidence import Evidence
from echo_hub.verify.drawn import DrawnRollout, pack_evidence
from echo_shared.process.child import ParentPipe
from echo_shared.records.rollout import unpack_payload


def clean(count: int) -> Evidence:
    return Evidence.of([0.0] * count, [-0.5] * count, [0.25] * count, [-0.5] * count)


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
        roundings, rollouts = (request["asked"], ()) if "prompts" in request else ((), request["asked"])
        with (run_dir / "requests").open("a") as requests:
            asked = f"{','.join(roundings)}@{request['version']}" if roundings else str(len(rollouts))
            requests.write(f"{asked}\n")
        for rounding in roundings:
            if rounding == "fatal" or (rounding == "deadly" and not (run_dir / "died").exists()):
                (run_dir / "died").touch()
                os._exit(9)
            if rounding == "too large":
                pipe.send({"rounding": rounding, "cannot": "The device has too little memory."})
            else:
                pipe.send({"rounding": rounding, "evidence": pack_evidence(clean(3)), "seconds": 0.25})
        for frame in rollouts:
            drawn = unpack_payload(DrawnRollout, frame)
            if drawn.rollout_id.startswith("deadly"):
                os._exit(9)
            spans = [{"node_id": "a", **pack_evidence(clean(len(drawn.completion_ids)))}]
            pipe.send({"rollout_id": drawn.rollout_id, "spans": spans, "seconds": 0.5})
    return 0


if __name__ == "__main__":
    sys.exit(serve(ParentPipe()))
