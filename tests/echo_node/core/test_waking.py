from echo_node.core.waking import GAP_S, Waking


def test_a_machine_is_kept_awake_while_its_node_works_on_mains() -> None:
    waking = Waking()
    assert not waking.wants(allowed=True, works=False, on_battery=False, now=0.0)
    assert not waking.wants(allowed=False, works=True, on_battery=False, now=1.0)
    for on_battery in (False, None):
        assert waking.wants(allowed=True, works=True, on_battery=on_battery, now=2.0)
    assert not waking.wants(allowed=True, works=True, on_battery=True, now=3.0)
    assert not waking.wants(allowed=True, works=False, on_battery=False, now=4.0), "a battery ends it"


def test_a_short_gap_between_leases_does_not_let_the_machine_sleep() -> None:
    waking = Waking()
    assert waking.wants(allowed=True, works=True, on_battery=None, now=100.0)
    assert waking.wants(allowed=True, works=False, on_battery=None, now=99.0 + GAP_S)
    assert not waking.wants(allowed=True, works=False, on_battery=None, now=100.0 + GAP_S)


def test_a_pause_ends_it_at_once_even_in_a_gap() -> None:
    waking = Waking()
    assert waking.wants(allowed=True, works=True, on_battery=None, now=0.0)
    assert not waking.wants(allowed=False, works=False, on_battery=None, now=1.0)
    assert not waking.wants(allowed=True, works=False, on_battery=None, now=2.0)
