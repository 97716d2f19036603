"""The library of Weights & Biases, in a process that may hang, fail and be killed: `echo_hub.sinks.wandb_sink` drives
`python -m echo_hub.sinks.wandb_process`."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from echo_hub.sinks.base import SAMPLES
from echo_shared.child import Frame, ParentPipe
from echo_shared.files import write_private

DETAIL_CHARACTERS: Final = 500
FINISH_S: Final = 6
"""Seconds for what is not yet sent, once the hub has closed its end."""
VERSION: Final = "policy_version"
"""The figure that all others are drawn over: W&B's own steps count what it was told."""
POSITION: Final = "position.json"


def open_run(wandb: Any, opening: Frame) -> Any:
    """The run of W&B: of this hub's earlier starts the same one."""
    directory = Path(opening["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=opening["project"],
        entity=opening["entity"] or None,
        id=opening["run_id"],
        name=opening["name"],
        mode=opening["mode"],
        resume="allow" if opening["mode"] == "online" else None,
        dir=str(directory),
        config=opening["settings"],
        settings=wandb.Settings(  # Figures are sent, and nothing of this machine.
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=FINISH_S,
            init_timeout=90,
            login_timeout=30,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )
    run.define_metric(VERSION, hidden=True)
    run.define_metric("*", step_metric=VERSION)
    return run


def row(wandb: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as W&B takes it; `at` is the hub's clock."""
    found: dict[str, Any] = {VERSION: entry["policy_version"], "at": entry["at"], **entry["scalars"]}
    for tag, values in entry["histograms"].items():
        found[tag] = wandb.Histogram(np.asarray(values, np.float64))
    if entry["texts"]:
        columns = ("rollout_id", "reward", "prompt", "completion")
        rows = [[text[column] for column in columns] for text in entry["texts"]]
        found[SAMPLES] = wandb.Table(columns=list(columns), data=rows)
    return found


def serve(pipe: ParentPipe) -> int:
    """Answers frame by frame until the hub closes its end; the exit status."""
    opening = pipe.receive()
    if opening is None:
        return 0
    try:
        import wandb
    except ImportError as error:
        pipe.send({"missing": str(error)})
        return 1
    except Exception as error:
        logging.exception("the library cannot be imported")
        pipe.send({"failed": _said(error)})
        return 1
    place = Path(opening["directory"]) / POSITION
    try:
        run = open_run(wandb, opening)
        pipe.send(_position(place, opening["run_id"]))
        while (frame := pipe.receive()) is not None:
            for entry in frame["entries"]:
                run.log(row(wandb, entry))
            write_private(place, json.dumps({"run_id": opening["run_id"], **frame["position"]}).encode())
            pipe.send({})
        run.finish()
    except Exception as error:
        # Another project's software: whatever it raises is told to the hub, and ends this process alone.
        logging.exception("W&B failed")
        pipe.send({"failed": _said(error)})
        return 1
    return 0


def _said(error: Exception) -> str:
    return (str(error) or repr(error))[:DETAIL_CHARACTERS]


def _position(place: Path, run_id: str) -> Frame:
    """How far the run of W&B has come; from the beginning where nothing is known, or of another run."""
    try:
        known = json.loads(place.read_bytes())
        if known["run_id"] == run_id:
            return {"step": int(known["step"]), "evaluated_at": float(known["evaluated_at"])}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {"step": 0, "evaluated_at": 0.0}


def _end_soon() -> None:
    """Whatever still holds this process then: its hub is gone."""
    timer = threading.Timer(2 * FINISH_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    status = serve(ParentPipe())
    _end_soon()
    sys.exit(status)
