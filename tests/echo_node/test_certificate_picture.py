"""The picture on a certificate of contribution shows node, work and hub as text within its frame; it is parsed as
XML.
"""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from echo_node.certificate_picture import HEIGHT, WIDTH, picture
from echo_shared.signing.identity import fingerprint
from tests.echo_shared.records.test_contribution import HUB, contribution

SVG = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(document).iter(f"{SVG}text")]


def test_the_picture_shows_node_work_and_hub() -> None:
    shown = texts(picture(contribution()))
    for text in ('a "node" <b>', "Sums, größer", "3,456", "in 12 completions", fingerprint(HUB.public_key)):
        assert text in shown
    assert any("echo-node receipts verify" in text for text in shown)


def test_names_are_drawn_as_plain_text() -> None:
    hostile = '</text><script>alert(1)</script><image href="http://x/"/>&amp;'
    document = picture(contribution(node_name=hostile, run_name=hostile))
    root = ElementTree.fromstring(document)
    assert {element.tag for element in root.iter()} == {f"{SVG}{name}" for name in ("svg", "rect", "line", "text")}
    assert texts(document).count(hostile) == 2
    assert not [element for element in root.iter() if any("href" in name for name in element.attrib)]


@pytest.mark.parametrize(("name", "ems"), [("W" * 64, 1.11), ("语" * 64, 1.0), ("i", 0.35), ("Q" * 64, 0.86)])
def test_the_longest_names_and_numbers_stay_within_the_frame(name: str, ems: float) -> None:
    """`ems`: width of the name's character, relative to the font size, in the wide font DejaVu Sans Bold."""
    most = 2**53
    said = contribution(
        node_name=name, run_name=name, run_id="x" * 64, trained_tokens=most, evaluated_tokens=most, checks_passed=most
    )
    root = ElementTree.fromstring(picture(said))
    assert root.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT}"
    for element in root.iter(f"{SVG}text"):
        text, size = element.text or "", float(element.attrib["font-size"])
        width = size * len(text) * (ems if text == name else 0.62)
        assert float(element.attrib["x"]) + width <= WIDTH - 24, text
        assert size >= 6 and float(element.attrib["y"]) <= HEIGHT - 24
