from __future__ import annotations

from benchmarks.papers import echo
from benchmarks.papers.plot import draw
from tests.benchmarks.papers.toy import ran


def test_a_picture_is_a_png() -> None:
    found = {case: [ran(0.5, 0.6), ran(0.5, 0.8)] for case in echo.PARITY.cases}
    assert draw(echo.PARITY, found).startswith(b"\x89PNG")
