from pathlib import Path

import pytest

from echo_shared.gguf.file_names import first_part, models_in, part_names

PARTS = ["m-q8_0-00001-of-00003.gguf", "m-q8_0-00002-of-00003.gguf", "m-q8_0-00003-of-00003.gguf"]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_names_all_parts(name: str) -> None:
    assert part_names(name) == tuple(PARTS)


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00000.gguf", "m-1-of-3.gguf", "m-00001-of-00003.bin"])
def test_any_other_file_is_whole(name: str) -> None:
    assert part_names(name) == (name,)


def test_a_split_model_counts_once(tmp_path: Path) -> None:
    for name in (*PARTS, "a.GGUF", "config.json"):
        (tmp_path / name).touch()
    assert [path.name for path in models_in(tmp_path)] == ["a.GGUF", PARTS[0]]


def test_llama_cpp_loads_the_first_part_of_a_whole_model(tmp_path: Path) -> None:
    files = [tmp_path / name for name in PARTS]
    assert first_part(files) == files[0]
    assert first_part(files[1:]) is None, "a part is missing"
    assert first_part([tmp_path / "a.gguf"]) == tmp_path / "a.gguf"
    assert first_part([tmp_path / "a.gguf", tmp_path / "b.gguf"]) is None, "two models"
    assert first_part([]) is None
