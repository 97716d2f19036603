from __future__ import annotations

from echo_shared.records.run import Accounting, VersionRecord


def test_the_accounting_reports_if_it_balances() -> None:
    good = Accounting(leased=10, trained=5, dropped={"stale": 2, "expired": 1}, in_flight=2)
    assert good.num_dropped == 3
    assert good.balanced
    assert not Accounting(leased=10, trained=5, in_flight=2).balanced
    assert Accounting().balanced


def test_a_version_counts_its_downloads() -> None:
    version = VersionRecord(policy_version=1, published_at=1.0, fetches_by_transport={"swarm": 2, "web_seed": 1})
    assert version.num_fetched == 3
