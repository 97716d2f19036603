"""Code shared by hub and node: messages, sessions, keys, seeded sampling, artefacts (files that nodes fetch).

It imports neither `echo_hub` nor `echo_node`; only its modules `sampling.torch_*` import torch.
"""

__version__ = "0.2.0"
