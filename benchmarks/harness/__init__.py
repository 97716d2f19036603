"""Hub, nodes, clients, processes and results that benchmarks share. See `site`, `driven_hub`, `stranger`."""
