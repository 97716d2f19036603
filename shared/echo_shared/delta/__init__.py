"""Lossless encoding of a policy version (a directory of adapter files) as one payload file.

A keyframe needs no other version; a delta is encoded against an earlier version, its parent. The caller must check the
decoded files against the signed manifest: a delta applied to a wrong parent may decode without an error.
"""

from echo_shared.delta.versions import decode, encode

__all__ = ["decode", "encode"]
