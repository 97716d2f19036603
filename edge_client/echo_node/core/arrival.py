"""Describe in words how an artefact came to this node."""

from __future__ import annotations

from echo_shared.wire.messages import Fetched


def arrival(fetched: Fetched) -> str:
    """Return the way that carried most bytes, the total size and the duration."""
    sent = fetched.pushed_bytes + fetched.mesh_bytes
    amounts = {
        "through the host's shared memory": fetched.shared_memory_bytes,
        "from a model hub": fetched.model_hub_bytes,
        "broadcast" if fetched.mesh_bytes else "inline": sent,
        "swarm": fetched.swarm_bytes,
        "web seed": fetched.web_seed_bytes,
    }
    total = sum(amounts.values())
    if not total:
        return "was already here"
    way = max(amounts, key=lambda name: amounts[name])
    others = f", {100 * fetched.mesh_bytes // total} % of it from other nodes" if way == "broadcast" else ""
    return f"{way}, {amount(total)} in {fetched.seconds:.1f} s{others}"


def amount(num_bytes: int) -> str:
    """Return the number of bytes with a suitable unit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
