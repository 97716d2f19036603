from __future__ import annotations

from echo_hub.core.tenant_names import TenantNames


def test_a_pseudonym_is_stable_and_hides_the_name() -> None:
    names = TenantNames(secret=b"secret of the run")
    known = {name: names.of(name) for name in ("Ada", "Bob", "Ä" * 64)}
    assert known == {name: names.of(name) for name in known} and len(set(known.values())) == 3
    for name, shown in known.items():
        assert shown.startswith("tenant-") and name not in shown and len(shown) <= 64
    assert TenantNames(secret=b"of another run").of("Ada") != known["Ada"]


def test_an_operator_may_let_nodes_see_names() -> None:
    assert TenantNames(secret=b"s", shown=True).of("Ada") == "Ada"
