"""The GGUF file of a whole model, opened for reading."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from echo_shared.errors import CodecError
from echo_shared.gguf.file_names import part_names
from echo_shared.gguf.summary import CheckedReader


class OpenedModel:
    """A model in GGUF format, opened for reading. Tensors are memory-mapped. Of a split model, the first part holds the
    metadata.

    Raises CodecError if a part is missing or unreadable.
    """

    def __init__(self, file: Path) -> None:
        """`file`: the model's only file, or one of its parts."""
        self.parts = tuple(file.with_name(name) for name in part_names(file.name))
        missing = [part.name for part in self.parts if not part.is_file()]
        if missing:
            raise CodecError(
                "A GGUF model is incomplete.",
                got=f"{file.parent} has no {', '.join(missing)}",
                do="Put all parts of the model into one directory.",
            )
        try:
            readers = [CheckedReader(part) for part in self.parts]
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise CodecError("A GGUF file cannot be read.", got=f"{file}: {error}") from error
        self.fields: dict[str, Any] = dict(readers[0].fields)
        """Metadata by name, as `gguf.ReaderField`."""
        self.tensors: dict[str, Any] = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        """Tensors by name, as `gguf.ReaderTensor`. Dimensions are in GGUF's order: columns first."""

    @property
    def architecture(self) -> str:
        """Name of the architecture in llama.cpp, such as qwen3; empty if the file names none."""
        return str(self.value("general.architecture") or "")

    def value(self, key: str) -> Any:
        """Return the metadata under this key; `{arch}` stands for the architecture's name. None if there is none."""
        field = self.fields.get(key.replace("{arch}", self.architecture) if "{arch}" in key else key)
        return None if field is None else field.contents()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape in PyTorch's order: rows first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def rows(self, name: str, count: int, begin: int = 0) -> NDArray[np.float32]:
        """Return `count` rows of the matrix `name`, from row `begin` on, dequantised to float32."""
        return self._dequantised(name, slice(begin, begin + count))

    def rows_at(self, name: str, numbers: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Return the rows with these indices of the matrix `name`, dequantised to float32."""
        return self._dequantised(name, numbers)

    def _dequantised(self, name: str, rows: slice | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        tensor = self.tensors[name]
        array: NDArray[np.float32] = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)
        return array

    @property
    def weights(self) -> str:
        """Type of the model's weights in lower case, such as f32, q8_0 or q4_k_m.

        If all matrices have one type, it is that type. Otherwise it is the type that the file's metadata names, or the
        type of most bytes.
        """
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.tensor_type.name.lower()] += int(tensor.n_bytes)
        if not sizes:
            raise CodecError("A GGUF file holds no model.", got=f"no matrix in {self.parts[0]}")
        largest = sizes.most_common(1)[0][0]
        named = _named_type(self.value("general.file_type"))
        return named if len(sizes) > 1 and named not in ("", "f32") else largest


def _named_type(file_type: Any) -> str:
    """Return the name of a file type in llama.cpp's numbering; empty if it is unknown."""
    try:
        name = gguf.LlamaFileType(file_type).name
    except ValueError:
        return ""
    return "" if name == "GUESSED" else name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
