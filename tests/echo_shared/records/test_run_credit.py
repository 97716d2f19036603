from __future__ import annotations

import pytest

from echo_shared.errors import CodecError
from echo_shared.records.run_credit import NodeCredit, RunCredit, sign, verified
from echo_shared.signing.identity import Identity
from echo_shared.signing.signed_document import moment

HUB = Identity.generate()


def said(*ids: str, run_id: str = "") -> RunCredit:
    return RunCredit(
        hub_key=HUB.public_key.hex(),
        run_id=run_id or f"{HUB.node_id}-1",
        run_name="sums",
        issued_at=moment(1e9),
        nodes=tuple(NodeCredit(node_id=one, node_name='<b>"x"', rollouts=3, tokens=40) for one in ids),
    )


@pytest.mark.parametrize("ids", [(), ("a",), ("a", "b", "c")])
def test_a_signed_credit_is_read_unchanged(ids: tuple[str, ...]) -> None:
    assert verified(sign(said(*ids), HUB)) == said(*ids)


def test_a_hub_can_only_credit_its_own_runs() -> None:
    another = Identity.generate()
    with pytest.raises(CodecError, match="not belong to the hub"):
        verified(sign(said("a", run_id=f"{another.node_id}-1"), HUB))


@pytest.mark.parametrize("ids", [("a", "a"), ("b", "a")])
def test_a_credit_names_each_node_once(ids: tuple[str, ...]) -> None:
    with pytest.raises(CodecError, match="without duplicates"):
        verified(sign(said(*ids), HUB))


def test_a_changed_credit_is_refused() -> None:
    with pytest.raises(CodecError, match="signature is wrong"):
        verified(sign(said("a"), HUB).replace(b'"rollouts": 3', b'"rollouts": 4'))
    with pytest.raises(CodecError, match="no credit of a run"):
        verified(sign(said("a"), HUB).replace(b'"rollouts": 3', b'"rollouts": -3'))
