from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vendor_uplot.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_uplot", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_load_the_unmodified_pinned_release(script: ModuleType) -> None:
    for name, sha256 in script.FILES.values():
        assert hashlib.sha256((script.DESTINATION / name).read_bytes()).hexdigest() == sha256
    assert f"(v{script.VERSION})" in (script.DESTINATION / "uplot.min.js").read_text(encoding="utf-8")[:100]
    assert "MIT" in (script.DESTINATION / "uplot.LICENSE").read_text(encoding="utf-8")


def test_another_package_is_refused_and_nothing_is_written(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "uplot-9.tgz").write_bytes(b"another")
    with pytest.raises(ValueError, match="not the pinned release"):
        script.unpack(tmp_path / "uplot-9.tgz", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["uplot-9.tgz"]
