"""Fetch the chat templates of published models, for tests: `python -m scripts.ci.chat_templates OUT`.

The templates are part of llama.cpp's source, in the source distribution of llama-cpp-python. If pip has compiled the
library on this machine, it takes the distribution from its cache; otherwise it downloads 76 MB.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Final

_FOLDER: Final = "vendor/llama.cpp/models/templates"


def fetch(out: Path) -> int:
    """Download the version of llama-cpp-python that is pinned. Return the number of templates written to `out`."""
    with tempfile.TemporaryDirectory() as downloads:
        what = ["--no-deps", "--no-binary", "llama-cpp-python", "-c", "constraints.txt", "llama-cpp-python"]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", downloads, *what], check=True)
        (archive,) = Path(downloads).glob("*.tar.gz")
        return extract(archive, out)


def extract(archive: Path, out: Path) -> int:
    """Write the templates in `archive` to `out`. Return their number."""
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    with tarfile.open(archive) as files:
        for member in files:
            path = PurePosixPath(member.name)
            if path.suffix == ".jinja" and str(path.parent).endswith(f"/{_FOLDER}"):
                content = files.extractfile(member)
                assert content is not None, "a template is a file"
                (out / path.name).write_bytes(content.read())
                written += 1
    if not written:
        raise SystemExit(f"{archive.name} has no templates in {_FOLDER}. Has llama.cpp moved them?")
    return written


if __name__ == "__main__":
    print(f"{fetch(Path(sys.argv[1]))} templates in {sys.argv[1]}")
