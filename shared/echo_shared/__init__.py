"""Code shared by hub and node: messages, sessions, identity, draws, artefacts. It imports neither side, and torch only
in the modules `sampling.torch_*`.
"""

__version__ = "0.2.0"
