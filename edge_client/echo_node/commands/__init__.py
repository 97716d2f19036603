"""The commands of `echo-node`, one module per topic."""
