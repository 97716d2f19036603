"""Measurements, one module each: `python -m benchmarks NAME` prints a table, `--json FILE` writes every figure.

A benchmark module has `DESCRIPTION`, `plan() -> list[Planned]`, which names its cases, and `measure(seed, progress) ->
Measurement`, which measures the cases that the user wants (`progress.wants`) and reports each finished case. If
`measure` has the parameter `scale` or `hours`, the command has an option of that name. If a case is omitted, its
headline figures are None. Benchmarks give figures; they do not pass or fail. Shared code is in `harness`.
"""
