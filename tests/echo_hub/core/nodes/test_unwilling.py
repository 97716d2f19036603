from __future__ import annotations

from echo_hub.core.nodes.unwilling import VERSIONS, UnwillingNodes


def test_nodes_refuse_some_or_all_tenants_and_never_the_run() -> None:
    nodes = UnwillingNodes()
    nodes.connected("a", answers=True, refuses=frozenset())
    assert nodes.of("Ada") == ()
    nodes.connected("b", answers=True, refuses=frozenset({"Ada"}))
    nodes.connected("c", answers=False, refuses=frozenset())
    assert nodes.of("Ada") == ("b", "c") and nodes.of("Bob") == ("c",) and nodes.of("") == ()


def test_only_the_newest_word_of_a_connected_node_counts() -> None:
    nodes = UnwillingNodes()
    nodes.connected("a", answers=False, refuses=frozenset())
    assert nodes.of("Ada") == ("a",)
    nodes.connected("a", answers=True, refuses=frozenset({"Bob"}))
    assert nodes.of("Ada") == () and nodes.of("Bob") == ("a",)
    nodes.disconnected("a")
    nodes.disconnected("a")
    assert nodes.of("Bob") == ()


def test_nodes_that_cannot_use_an_adapter_are_known_until_they_leave() -> None:
    nodes = UnwillingNodes()
    nodes.connected("a", answers=True, refuses=frozenset({"Ada"}))
    for node_id in ("b", "a", "b"):
        nodes.cannot_use(node_id, 7)
    assert nodes.of("Ada", 7) == ("a", "b") and nodes.of("Bob", 7) == ("b", "a")
    assert nodes.of("Bob", 8) == () and nodes.of("", 7) == ()
    nodes.disconnected("b")
    assert nodes.of("Bob", 7) == ("a",)
    for version in range(10, 10 + VERSIONS):
        nodes.cannot_use("a", version)
    assert nodes.of("Bob", 7) == (), "old reports are forgotten"
