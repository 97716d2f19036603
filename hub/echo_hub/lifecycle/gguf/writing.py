"""Write GGUF files with a tokenizer: the vocabulary alone, or a model file that had none. Tensors are copied as they
are.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

import gguf

from echo_hub.lifecycle.gguf.vocabulary import Field, Reading, Vocabulary

_ANY_ARCHITECTURE: Final = "llama"
"""Architecture of a file without tensors. llama.cpp reads only its vocabulary."""
_OWN: Final = ("GGUF.", gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.NAME, "tokenizer.")
"""Fields of the source file that are not copied: the writer adds or replaces them itself."""


def write_vocabulary(file: Path, vocabulary: Vocabulary) -> None:
    """Write a GGUF file without tensors: the vocabulary's fields and its first reading."""
    with closing(gguf.GGUFWriter(file, _ANY_ARCHITECTURE)) as writer:
        _add(writer, vocabulary.fields_with(vocabulary.readings[0]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()


def write_with_tokenizer(
    source: Path, file: Path, vocabulary: Vocabulary, reading: Reading, *, about: Iterable[Field]
) -> None:
    """Copy the model file `source` to `file`, with this tokenizer and its `reading`. `about` are further fields. Raises
    OSError.
    """
    reader = gguf.GGUFReader(source)
    needed, free = source.stat().st_size, shutil.disk_usage(file.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 2**20:.0f} MiB needed, {free / 2**20:.0f} MiB free")
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    with closing(gguf.GGUFWriter(file, architecture)) as writer:
        _add(writer, about)
        for field in reader.fields.values():
            if not field.name.startswith(_OWN):
                item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item)
        _add(writer, vocabulary.fields_with(reading))
        for tensor in reader.tensors:
            data = tensor.data
            writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            writer.write_tensor_data(tensor.data)


def _add(writer: gguf.GGUFWriter, fields: Iterable[Field]) -> None:
    for field in fields:
        writer.add_key_value(field.key, field.value, field.type, sub_type=field.item_type)
