"""Policy versions as one file each: a directory of adapter files, whole (a keyframe) or against an earlier version's
(a delta). Lossless: every file comes back byte for byte.

The caller checks the result against the signed manifest all the same: a delta that is applied to another parent than
the one it was made against may decode into something else.
"""

from echo_shared.delta.versions import decode, encode

__all__ = ["decode", "encode"]
