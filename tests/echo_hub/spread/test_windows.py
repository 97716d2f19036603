from __future__ import annotations

import pytest

from echo_hub.spread.windows import SAMPLE_S, SAMPLES_KEPT, BroadcastPaths, Handing, Window

PIECE = 10_000
LEAST = 2 * PIECE


def window(*, bursts: bool = False) -> Window:
    return Window(first_bytes=4 * PIECE, slack_s=0.1, bursts=bursts)


def stream(window: Window, *, rate: float, delay_s: float, seconds: float, now: float = 0.0) -> float:
    """Keep the window full on a link of this rate, with evenly spaced arrivals; return the time at the end."""
    end, step = now + seconds, PIECE / rate
    while now < end:
        while window.has_room(LEAST):
            window.sent(PIECE, now)
        now += step
        queued_s = max(delay_s, window.bytes_in_flight / rate)
        window.arrived(PIECE, queued_s, now)
    return now


def test_an_unmeasured_window_is_the_first_bytes_or_the_minimum() -> None:
    assert window().size(LEAST) == 4 * PIECE
    assert window().size(9 * PIECE) == 9 * PIECE
    assert window().rate is None and window().steady_rate is None


def test_the_window_settles_at_rate_times_delay_plus_slack() -> None:
    link = window()
    stream(link, rate=1e6, delay_s=0.05, seconds=10 * SAMPLES_KEPT * SAMPLE_S)
    assert link.rate == pytest.approx(1e6, rel=0.1)
    assert link.steady_rate == pytest.approx(1e6, rel=0.1)
    assert link.size(LEAST) == pytest.approx(1e6 * (link.delay + 0.1), rel=0.1)
    assert link.size(LEAST, 0.0) == pytest.approx(1e6 * link.delay, rel=0.1)


def test_a_slower_link_shrinks_the_window() -> None:
    link = window()
    now = stream(link, rate=1e6, delay_s=0.05, seconds=3)
    stream(link, rate=1e5, delay_s=0.05, seconds=30, now=now)
    assert link.rate == pytest.approx(1e5, rel=0.2)


def test_a_sender_with_little_to_send_learns_no_low_rate() -> None:
    link = window()
    now = stream(link, rate=1e6, delay_s=0.05, seconds=3)
    link.lost(link.bytes_in_flight)
    before = link.rate
    for _ in range(100):
        link.sent(PIECE, now)
        now += 1.0
        link.arrived(PIECE, 0.05, now)
    assert link.rate == before


def test_a_rate_counts_as_proven_once_the_window_was_full_all_the_time() -> None:
    idle, busy = window(), window()
    now = 0.0
    for _ in range(100):
        for _ in range(2):
            idle.has_room(LEAST)
            idle.sent(PIECE, now)
        for _ in range(2):
            now += 0.1
            idle.arrived(PIECE, 0.1, now)
    assert idle.rate is not None and not idle.kept_full
    stream(busy, rate=1e6, delay_s=0.05, seconds=1)
    assert busy.kept_full


def test_the_time_until_the_first_arrival_is_no_part_of_the_rate() -> None:
    link = window()
    for _ in range(4):
        link.has_room(LEAST)
        link.sent(PIECE, 0.0)
    for number in range(4):
        link.arrived(PIECE, 5.0, 5.0 + 0.05 * number)
    assert link.rate == pytest.approx(PIECE / 0.05)


def test_bursts_do_not_exaggerate_the_rate() -> None:
    best, average = window(), window(bursts=True)
    for link in (best, average):
        now = 0.0
        for burst in range(40):
            while link.has_room(LEAST):
                link.sent(PIECE, now)
            now += SAMPLE_S * (1.5 if burst % 2 else 1.0)
            for _ in range(1 + 3 * (burst % 2)):
                link.arrived(PIECE, 0.3, now)
    assert average.rate is not None and best.rate is not None
    assert average.rate < 0.8 * best.rate


def test_arrived_or_lost_bytes_free_the_window() -> None:
    link = window()
    for _ in range(4):
        link.sent(PIECE, 0.0)
    assert not link.has_room(LEAST)
    link.lost(PIECE)
    assert link.has_room(LEAST)
    link.arrived(PIECE, 0.01, 0.01)
    assert link.bytes_in_flight == 2 * PIECE


def test_paths_are_per_node_and_count_changes_of_links() -> None:
    paths = BroadcastPaths()
    assert paths["a"] is paths["a"] is not paths["b"]
    paths.set_links("a", ["b", "b"])
    assert paths["a"].links == {"b"} and paths.links_changed == 1
    paths.forget("a")
    assert paths["a"].links == frozenset() and paths.links_changed == 2


def test_a_nodes_relay_rate_is_measured_while_it_has_copies_to_send() -> None:
    handing, now = Handing(), 0.0
    for _ in range(12):
        handing.sent(3 * 1_000, now)
        for copy in (1, 2, 3):
            handing.arrived(1_000, now + copy * 0.1 + 0.02)  # 10,000 bytes a second, plus the delay of one hop.
        now += 5.0  # The following idle time must not make the link count as slow.
    assert handing.rate == pytest.approx(3_000 / 0.32)
    handing.sent(1_000, now)
    handing.arrived(1_000, now + 0.5)
    assert handing.rate == pytest.approx(3_000 / 0.32), (
        "for a single copy, most of the time is the delay to the receiver"
    )
    assert handing.bytes_in_flight == 0


def test_a_node_that_always_has_copies_to_send_is_measured_too() -> None:
    handing = Handing()
    handing.sent(200 * 1_000, 0.0)
    for copy in range(1, 101):
        handing.arrived(1_000, copy * 0.1)
    assert handing.rate == pytest.approx(10_000, rel=0.1)
    assert handing.bytes_in_flight == 100 * 1_000
    handing.lost(100 * 1_000)
    assert handing.has_room(1_000)
    handing.sent(3_000, 10.0)
    assert handing.has_room(1_000)
    handing.sent(1_000, 10.0)
    assert not handing.has_room(1_000), "0.35 s worth of bytes at 10,000 bytes a second are in flight"


def test_each_node_has_the_smallest_number_that_is_free() -> None:
    paths = BroadcastPaths()
    assert [paths[name].number for name in "abca"] == [0, 1, 2, 0]
    paths.forget("b")
    assert (paths.named(1), paths["d"].number, paths.named(1), paths["e"].number) == (None, 1, "d", 3)
