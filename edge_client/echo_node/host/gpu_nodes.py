"""Makes the device files of CUDA where the kernel's driver is loaded and they are missing, as on servers after a start.

CUDA makes them itself by the program nvidia-modprobe, which has root's rights. A process in its cage starts no program,
and would get no such rights, so that this is done before.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_DRIVER: Final = Path("/proc/driver/nvidia")
_NODE: Final = Path("/dev/nvidia-uvm")
_PROGRAM: Final = "nvidia-modprobe"
_OPTIONS: Final = ("-u", "-c=0")
"""Loads the module of unified memory, and makes its files."""
_PATH: Final = "/usr/bin:/usr/local/bin:/usr/sbin:/sbin"
_PATIENCE_S: Final = 30.0


def make_nodes() -> None:
    """Blocks for up to seconds. A failure is told in the log: CUDA says then what it lacks."""
    program = shutil.which(_PROGRAM, path=_PATH)
    if not _DRIVER.exists() or _NODE.exists() or program is None:
        return
    try:
        subprocess.run([program, *_OPTIONS], capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        log.warning("%s is missing, and %s does not make it: %s %s", _NODE, _PROGRAM, error, said.strip())
