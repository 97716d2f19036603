"""Convert a GGUF file to a base model in Hugging Face layout, once, with transformers' reader.

    python -m echo_hub.run.gguf_base FILE DIRECTORY

Weights are converted to bfloat16, but a file with only float32 weights keeps float32. The result is stored in the hub's
cache directory under the file's name, size and modification time. Learner and nodes use it like any other model.
transformers loads PyTorch, so the conversion runs in a separate process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import platformdirs

from echo_shared.errors import ConfigError
from echo_shared.files.atomic import atomic_directory

log = logging.getLogger(__name__)

SUFFIX: Final = ".gguf"
_CACHE: Final = "echo-hub"
_SHOWN_CHARACTERS: Final = 500


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that `path` names: `path` itself, or the only GGUF file in a directory that contains no
    other model. Return None if there is no such file.
    """
    if path.is_file() and path.suffix.lower() == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    found = [file for file in path.iterdir() if file.suffix.lower() == SUFFIX and file.is_file()]
    if len(found) > 1:
        raise ConfigError(
            "This directory contains several GGUF files.",
            got=f"{', '.join(sorted(file.name for file in found))} in {path}",
            do="Set model.base to one of them. Join the parts of one model first: llama-gguf-split --merge.",
        )
    return found[0] if found else None


def unpacked(file: Path) -> Path:
    """Return the directory of the converted model. If the file is not converted yet, convert it first, which takes
    minutes.

    Raises ConfigError if transformers cannot read the file, StorageError if the disk refuses.
    """
    file = file.resolve()
    state = file.stat()
    key = hashlib.sha256(f"{file}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()[:16]
    directory = platformdirs.user_cache_path(_CACHE, appauthor=False) / "gguf" / f"{file.stem}-{key}"
    if directory.is_dir():
        return directory
    log.warning("converting %s for PyTorch, once; this takes minutes and four times its size on disk", file)
    with atomic_directory(directory) as unfinished:
        command = [sys.executable, "-m", "echo_hub.run.gguf_base", str(file), str(unfinished)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            said = process.stderr.read()
        if process.returncode != 0:
            shutil.rmtree(unfinished)
            lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
            raise ConfigError(
                "This GGUF file cannot be the base model.",
                got=f"{file}: {lines[-1] if lines else f'exit status {process.returncode}'}"[:_SHOWN_CHARACTERS],
                do="Set model.base to the model's directory in Hugging Face layout, or to its id on the model hub.",
            )
    return directory


def unpack(file: Path, directory: Path) -> None:
    """Write the model in `file` to `directory`. Raises whatever transformers raises."""
    from gguf import GGMLQuantizationType, GGUFReader

    exact = all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in GGUFReader(file).tensors)

    # Import here, after the file was read: the import is slow, and a damaged file is refused at once.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype="float32" if exact else "bfloat16",
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True).save_pretrained(directory)


def _end_with_parent() -> None:
    """End this process when its standard input closes, because this happens when the hub ends."""

    def watch() -> None:
        os.read(0, 1)  # Do not read through sys.stdin: Python would wait for the lock of sys.stdin at exit.
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
