"""The headline has separate figures for open homes, for homes behind symmetric routers, and for homes behind other
routers.
"""

from typing import Any

from benchmarks.dissemination import headline


def row(ratio: float, **changes: Any) -> dict[str, Any]:
    common = {"side": "echo", "nodes": 8, "payload_bytes": 8_000_000, "loss": 0.002, "ratio_to_bound": ratio}
    return {**common, "over_bound_s": 0.1, "emulator_cores": 0.5, "hub_payloads": 3.0, **changes}


def behind(kind: str, ratio: float, **changes: Any) -> dict[str, Any]:
    return row(ratio, behind=f"behind {kind}", **{"linked_share": 1.0, "link_s": 1.0, **changes})


def test_homes_behind_routers_have_figures_of_their_own() -> None:
    rows = [
        row(1.3),
        behind("cone", 1.5, link_s=2.0),
        behind("ipv6 and dual", 1.4, linked_share=0.9),
        behind("symmetric", 9.0, linked_share=0.0, hub_payloads=8.0),
        {**behind("cone", 7.0), "side": "libtorrent"},
    ]
    found = headline([], [], [], rows)
    assert found["wan_ratio_8MB"] == 1.3
    assert (found["linked_share"], found["link_s"], found["wan_ratio_8MB_behind"]) == (0.9, 2.0, 1.5)
    assert (found["hub_payloads_behind"], found["hub_bytes_symmetric"]) == (3.0, 8.0)
