"""Measurements, one module each: `python -m benchmarks NAME` prints a table, `--json FILE` writes every figure.

A benchmark module has `DESCRIPTION`, `plan() -> list[Planned]`, which names its cases, and
`measure(seed, progress) -> Measurement`, which measures those that `progress.wants` and tells it of each that is done.
What a case that was left out would have given is None in the headline. No benchmark judges: figures only.
"""
