"""A sequence's logits stay the same if the sequence is fed in pieces, is copied, or shares a batch with other
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from echo_node.backends.base import OUT_OF_MEMORY
from echo_node.backends.kv_layout import KvLayout
from echo_node.backends.llama_cpp_native import LlamaContext, ModelOptions
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import BackendError
from echo_shared.gguf.adapter_file import write_adapter
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.shape import read_shape
from echo_shared.gguf.summary import read_summary

OPTIONS = ModelOptions(batch_tokens=64, threads=1, exact=True, num_layers=4)
PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.fixture(params=[True, False], ids=["unified", "apart"])
def llama(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Iterator[LlamaContext]:
    context = LlamaContext()
    context.open(convert_model(base, tmp_path, "f32"), OPTIONS)
    context.reserve(KvLayout(sequences=4, cells=256, unified=request.param))
    yield context
    context.close()


def step(
    llama: LlamaContext, tokens: list[int], positions: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return llama.feed_rows(np.array(tokens, np.int32), np.array(positions, np.int32)).copy()


def test_pieces_of_a_prompt_are_the_prompt(llama: LlamaContext) -> None:
    whole = llama.feed_prompt(PROMPT, 0, 0).copy()
    llama.feed_prompt(PROMPT[:7], 0, 3)
    np.testing.assert_allclose(llama.feed_prompt(PROMPT[7:], 7, 3), whole, atol=1e-4)


def test_a_copied_sequence_is_independent_and_can_be_truncated(llama: LlamaContext) -> None:
    length = len(PROMPT)
    llama.feed_prompt(PROMPT, 0, 0)
    llama.copy_sequence(0, 1)
    apart = step(llama, [7, 8], [length, length])
    assert not np.allclose(apart[0], apart[1], atol=1e-2)
    llama.copy_sequence(1, 2)
    llama.remove_sequence(2, length)
    again = step(llama, [3, 4, 7], [length + 1, length + 1, length])
    np.testing.assert_allclose(again[2], apart[0], atol=1e-4)


def test_a_freed_sequence_starts_empty(llama: LlamaContext) -> None:
    alone = llama.feed_prompt(PROMPT[:4], 0, 1).copy()
    llama.remove_sequence(1)
    llama.feed_prompt(PROMPT, 0, 0)
    np.testing.assert_allclose(llama.feed_prompt(PROMPT[:4], 0, 1), alone, atol=1e-4)


def test_the_adapter_survives_another_layout(
    llama: LlamaContext, base: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "adapter.gguf"
    sizes = read_summary(convert_model(base, tmp_path, "f32")).sizes
    write_adapter(load_adapter(make_adapter(base, 1)), read_shape(base), sizes, path)
    bare = llama.feed_prompt(PROMPT, 0, 0).copy()
    adapter = llama.load_adapter(path)
    llama.set_adapter(adapter)
    adapted = llama.feed_prompt(PROMPT, 0, 0).copy()
    assert not np.allclose(adapted, bare, atol=1e-2)
    llama.reserve(KvLayout(sequences=2, cells=512, unified=False))
    np.testing.assert_allclose(llama.feed_prompt(PROMPT, 0, 1), adapted, atol=1e-4)
    llama.set_adapter(None)
    llama.free_adapter(adapter)
    np.testing.assert_allclose(llama.feed_prompt(PROMPT, 0, 1), bare, atol=1e-4)


def test_a_full_cache_counts_as_out_of_memory(llama: LlamaContext) -> None:
    llama.reserve(KvLayout(sequences=1, cells=256, unified=True))
    for begin in range(0, 256, 64):
        llama.feed_prompt(np.ones(64, np.int32), begin, 0)
    with pytest.raises(BackendError) as caught:
        step(llama, [1], [256])
    assert caught.value.code == OUT_OF_MEMORY


def test_files_that_are_no_models_or_adapters(llama: LlamaContext, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"noise")
    with pytest.raises(BackendError):
        LlamaContext().open(tmp_path / "noise", OPTIONS)
    with pytest.raises(BackendError):
        llama.load_adapter(tmp_path / "noise")
    llama.feed_prompt(PROMPT, 0, 0)
