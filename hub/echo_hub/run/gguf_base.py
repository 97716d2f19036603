"""Convert a GGUF file to a base model in Hugging Face layout, once, with transformers' reader.

    python -m echo_hub.run.gguf_base FILE DIRECTORY

Weights are converted to bfloat16, but a file with only float32 weights keeps float32. The result is stored in the hub's
cache directory under the file's name, size and modification time. Learner and nodes use it like any other model; nodes
that run llama.cpp get the file itself (`echo_hub.run.offered_gguf`). transformers loads PyTorch, so the conversion runs
in a separate process. transformers reads only whole files, so the parts of a split model are joined for it first.
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
from typing import TYPE_CHECKING, Any, Final

import platformdirs

from echo_shared.errors import ConfigError
from echo_shared.files.atomic import atomic_directory
from echo_shared.gguf.file_names import SUFFIX, models_in, part_names

if TYPE_CHECKING:
    from echo_shared.gguf.opened_model import OpenedModel

log = logging.getLogger(__name__)

_CACHE: Final = "echo-hub"
_FORMAT: Final = "2"
"""Part of the name under which a converted model is stored. A change of the conversion raises it, so that old results
are not used."""
_DIGITS_APART: Final = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b")
"""Values of `tokenizer.ggml.pre` with which llama.cpp first splits text at each digit. transformers 5.23 has no
equivalent.
"""
_SHOWN_CHARACTERS: Final = 500
_OF_ONE_FILE: Final = ("GGUF.", "split.", "general.alignment", "general.architecture")
"""Beginnings of the names of metadata that describe one file, not the model. The writer sets them itself."""


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that `path` names: `path` itself, or the only GGUF model in the directory `path`. A split
    model is named by one of its parts. Return None if a GGUF file is missing, or if weights in another format exist
    next to it.
    """
    if path.is_file() and path.suffix.lower() == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return None
    found = models_in(path)
    if len(found) > 1:
        raise ConfigError(
            "This directory contains several GGUF files.",
            got=f"{', '.join(file.name for file in found)} in {path}",
            do="Name one of these files.",
        )
    return found[0] if found else None


def unpacked(file: Path) -> Path:
    """Return the directory of the converted model. If the file is not converted yet, convert it first, which takes
    minutes.

    Raises ConfigError if transformers cannot read the file, StorageError if the disk refuses.
    """
    # Keep the file's own name: a link in the model hub's cache points to a file that is named by its hash.
    file = file.absolute()
    key = hashlib.sha256("\0".join([_FORMAT, *map(_state, _parts(file))]).encode()).hexdigest()[:16]
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


def _parts(file: Path) -> list[Path]:
    """Return the paths of all parts of the model. Raises ConfigError if one is missing."""
    parts = [file.with_name(name) for name in part_names(file.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(
            "This GGUF model is incomplete.",
            got=f"{file.parent} has no {', '.join(missing)}",
            do="Put all parts of the model into one directory.",
        )
    return parts


def _state(part: Path) -> str:
    part = part.resolve()
    state = part.stat()
    return f"{part}\0{state.st_size}\0{state.st_mtime_ns}"


def unpack(file: Path, directory: Path) -> None:
    """Convert the model in `file`, and write it to `directory`. Raises any error that transformers raises."""
    from echo_shared.gguf.opened_model import OpenedModel

    model_file = OpenedModel(file)
    exact = model_file.weights == "f32"
    if len(model_file.parts) > 1:
        joined = directory / f"joined{SUFFIX}"
        join(model_file, joined)
        try:
            _unpack_whole(joined, directory, exact=exact)
        finally:
            joined.unlink()
    else:
        _unpack_whole(file, directory, exact=exact)


def join(model_file: OpenedModel, path: Path) -> None:
    """Write all parts of a split model to one file."""
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, model_file.architecture)
    for name, field in model_file.fields.items():
        if not name.startswith(_OF_ONE_FILE):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for name, tensor in model_file.tensors.items():
        writer.add_tensor_info(name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in model_file.tensors.values():
        writer.write_tensor_data(tensor.data)
    writer.close()


def _unpack_whole(file: Path, directory: Path, *, exact: bool) -> None:
    # Import here, after the file was read: the import is slow, and damaged files are refused earlier.
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype="float32" if exact else "bfloat16",
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    split = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if split is not None and split.contents() in _DIGITS_APART:
        digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.save_pretrained(directory)


def _end_with_parent() -> None:
    """End this process when its standard input closes, because this happens when the hub ends."""

    def watch() -> None:
        os.read(0, 1)  # Do not read through sys.stdin: Python would wait for the lock of sys.stdin at exit.
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
