from dataclasses import asdict

from echo_node.findings import Finding


def test_a_finding_is_reported_as_json() -> None:
    finding = Finding(subject="GPU", level="note", what="none")
    assert asdict(finding) == {"subject": "GPU", "level": "note", "what": "none", "do": ""}
