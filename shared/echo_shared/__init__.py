"""What hub and node agree on: messages, sessions, identity, draws, artefacts. Imports neither side, and no torch
outside `torch_sampler`."""

__version__ = "0.2.0"
