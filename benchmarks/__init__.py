"""Measurements, one module each: `python -m benchmarks NAME` prints a table, `--json FILE` writes every figure.

A benchmark module has `DESCRIPTION` and `measure(seed) -> Measurement`. No benchmark judges: figures only.
"""
