"""Creates CUDA's device files if they are missing although the kernel has loaded the driver, as after a server's boot.

CUDA itself creates these files with the setuid program nvidia-modprobe. A process in a cage (sandbox) can neither start
a program nor gain rights, so the node runs nvidia-modprobe before an engine enters its cage.
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
"""Options of nvidia-modprobe: load the kernel module for CUDA's unified memory, and create its device files."""
_PATH: Final = "/usr/bin:/usr/local/bin:/usr/sbin:/sbin"
_PATIENCE_S: Final = 30.0


def make_nodes() -> None:
    """Create the device files. Blocks the calling thread for seconds. A failure is only logged; CUDA then reports the
    missing file itself.
    """
    program = shutil.which(_PROGRAM, path=_PATH)
    if not _DRIVER.exists() or _NODE.exists() or program is None:
        return
    try:
        subprocess.run(
            [program, *_OPTIONS], capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        log.warning("%s is missing, and %s cannot create it: %s %s", _NODE, _PROGRAM, error, said.strip())
