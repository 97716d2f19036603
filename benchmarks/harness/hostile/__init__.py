"""Nodes whose engines falsify their work: `python -m benchmarks.harness.hostile.node`, with the options of
echo-node."""
