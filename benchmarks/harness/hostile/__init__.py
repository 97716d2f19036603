"""Nodes whose engines falsify their results. Start one by `python -m benchmarks.harness.hostile.node`, with the options
of echo-node.
"""
