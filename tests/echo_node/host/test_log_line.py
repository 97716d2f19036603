from __future__ import annotations

from echo_node.host.log_line import LogLine, line_of


def test_only_the_first_line_of_an_entry_has_a_time() -> None:
    assert line_of("2026-01-02 03:04:05,678 half and whole") == LogLine("2026-01-02 03:04:05,678", "half and whole")
    assert line_of("  File x, line 3") == LogLine(None, "  File x, line 3")
    assert line_of("") == LogLine(None, "")
