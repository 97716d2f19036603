"""The dissemination headline, computed from a few handwritten rows."""

from benchmarks.dissemination import headline


def sent(side: str, megabytes: float, nodes: int, hub_up: int, seconds: float, bound_s: float) -> dict[str, object]:
    return {
        "side": side,
        "payload_bytes": int(megabytes * 1e6) + 900,
        "nodes": nodes,
        "hub_up_mbit_s": hub_up,
        "seconds": seconds,
        "ratio_to_bound": seconds / bound_s,
        "over_bound_s": seconds - bound_s,
    }


def over_wan(side: str, megabytes: float, loss: float, seconds: float, bound_s: float) -> dict[str, object]:
    return {**sent(side, megabytes, 8, 100, seconds, bound_s), "loss": loss, "emulator_cores": 0.2}


def delta(lr: float, dtype: str, ratio: float, *, exact: bool = True) -> dict[str, object]:
    return {"lr": lr, "dtype": dtype, "delta_ratio": ratio, "exact": exact}


def virtual(nodes: int, kind: str, ratio: float, cpu_s: float) -> dict[str, object]:
    return {"side": "simulated", "nodes": nodes, "kind": kind, "ratio_to_bound": ratio, "planner_cpu_s": cpu_s}


def test_the_worst_of_the_link_sets_counts() -> None:
    rows = [
        sent("echo", 64, 8, 20, 30.0, 25.0),
        sent("echo", 64, 8, 100, 11.0, 10.0),
        sent("echo", 8, 8, 20, 4.0, 3.2),
        sent("echo", 8, 8, 100, 2.0, 1.0),
        sent("echo", 0.5, 8, 20, 0.5, 0.2),
        sent("echo", 0.5, 8, 100, 0.3, 0.1),
        sent("echo", 8, 4, 20, 4.0, 3.2),
        sent("echo", 8, 16, 20, 5.0, 3.2),
        sent("echo", 8, 16, 100, 9.0, 1.0),
        sent("http", 64, 8, 20, 210.0, 25.0),
        sent("http", 64, 8, 100, 41.0, 10.0),
        sent("libtorrent", 64, 8, 20, 50.0, 25.0),
    ]
    deltas = [
        delta(1e-5, "bfloat16", 0.2),
        delta(1e-5, "bfloat16", 0.25),
        delta(1e-5, "float32", 0.9),
        delta(1e-4, "bfloat16", 0.3),
    ]
    fleets = [
        virtual(64, "equal", 1.2, 0.1),
        virtual(64, "unequal", 1.25, 0.1),
        virtual(256, "equal", 1.3, 0.2),
        virtual(256, "unequal", 1.2, 0.9),
    ]
    far = [
        over_wan("echo", 8, 0.0, 2.8, 2.0),
        over_wan("echo", 8, 0.002, 3.0, 2.0),
        over_wan("echo", 8, 0.01, 4.0, 2.0),
        over_wan("echo", 0.5, 0.0, 0.5, 0.2),
        over_wan("echo", 0.5, 0.01, 1.0, 0.2),
        {**over_wan("http", 8, 0.01, 9.0, 2.0), "emulator_cores": 0.4},
    ]
    assert headline(rows, deltas, fleets, far) == {
        "ratio_to_bound_64MB_N8": 30 / 25,
        "ratio_to_bound_8MB_N8": 2.0,
        "start_overhead_s": 0.5 - 0.2,
        "speedup_over_unicast": 7.0,
        "growth_N16_over_N4": 1.25,
        "delta_ratio_lr1e_5": 0.25,
        "delta_ratio_lr1e_4": 0.3,
        "delta_exact": True,
        "ratio_N64": 1.25,
        "ratio_N256": 1.3,
        "ratio_N1024": None,
        "wan_ratio_8MB": 1.5,
        "wan_ratio_8MB_lossy": 2.0,
        "wan_over_bound_s_0_5MB": 1.0 - 0.2,
        "wan_emulator_cores": 0.4,
        "planner_cpu_s_per_version": 0.9,
    }
    assert {*headline([], [], [], []).values()} == {None}, "nothing was measured"
    inexact = [*deltas, delta(1e-4, "float32", 0.9, exact=False)]
    assert headline(rows, inexact, [], far)["delta_exact"] is False
