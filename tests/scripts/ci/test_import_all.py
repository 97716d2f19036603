"""Only an optional library may be missing; any other failing import is an error."""

import sys
from pathlib import Path

import pytest

from scripts.ci import import_all


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "some_package"
    directory.mkdir()
    (directory / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_all, "PACKAGES", ("some_package",))
    for name in ("some_package", "some_package.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return directory


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("", "2 modules imported; skipped: none"),
        ("import no_such_extra", "1 without no_such_extra"),
    ],
    ids=["whole", "optional"],
)
def test_optional_libraries_may_be_missing(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    (package / "part.py").write_text(code)
    monkeypatch.setattr(import_all, "OPTIONAL", frozenset({"no_such_extra"}))
    import_all.main()
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("code", ["import not_declared_anywhere", "raise DeprecationWarning('old')"])
def test_any_other_import_failure_is_an_error(package: Path, code: str) -> None:
    (package / "part.py").write_text(code)
    with pytest.raises(SystemExit, match=r"some_package\.part"):
        import_all.main()
