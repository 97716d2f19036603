"""Measurements, one module each: `python -m benchmarks NAME` prints a table, `--json FILE` writes every figure.

A benchmark module has `DESCRIPTION`, `plan() -> list[Planned]`, which names its cases, and
`measure(seed, progress) -> Measurement`, which measures the cases that `progress.wants` and reports each finished case.
A `measure` that takes `scale` or `hours` has that option of the command.
Headline figures of omitted cases are None. Benchmarks give figures, not verdicts. What they share is in `harness`.
"""
