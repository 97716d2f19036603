"""Make GGUF files of a base model like those that operators download: quantised, in one file or split."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.opened_model import OpenedModel

KINDS = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
}
_OWN = ("GGUF.", "general.architecture", "general.file_type")


def write_gguf(base_dir: Path, path: Path, kind: str = "q8_0", *, tensors_each: int = 0) -> Path:
    """Write the model in `base_dir` to `path`, with all matrices in the format `kind`. With `tensors_each`, split it
    into parts of that many tensors. Return the file, or the first part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    exact = OpenedModel(convert_model(base_dir, path.parent / "exact", "f32"))
    writer = gguf.GGUFWriter(path, exact.architecture, split_max_tensors=tensors_each)
    for name, field in exact.fields.items():
        if not name.startswith(_OWN):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_file_type(KINDS[kind])
    stored = gguf.GGMLQuantizationType[kind.upper()]
    for name, tensor in exact.tensors.items():
        if len(tensor.shape) == 1:
            writer.add_tensor(name, np.array(tensor.data))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.array(tensor.data), stored), raw_dtype=stored)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not tensors_each:
        return path
    return min(path.parent.glob(f"{path.stem}-*.gguf"))
