from __future__ import annotations

from echo_node.core.tenant_choice import TenantChoice


def test_an_owner_refuses_some_or_all_tenants_and_never_the_run() -> None:
    willing, choosy, none = TenantChoice(), TenantChoice(refuses=("Ada",)), TenantChoice(answers=False)
    assert [one.refuses_work_of("Ada") for one in (willing, choosy, none)] == [False, True, True]
    assert [one.refuses_work_of("Bob") for one in (willing, choosy, none)] == [False, False, True]
    assert not any(one.refuses_work_of("") for one in (willing, choosy, none))
