from __future__ import annotations

import re
from pathlib import Path

import pytest

from echo_hub.dashboard import live_parts
from echo_hub.dashboard.live_parts import difference, rendering

PAGE = """<!doctype html><html lang="en"><head><title>{title}</title></head><body>
<h1><bdi>x</bdi> <span id="state" role="status" data-live><span class="dot">{state}</span></span></h1>
<div id="now" data-live><div><p>{now}</p></div></div>
<table><tbody id="nodes" data-live="rows">
{rows}
</tbody></table>
<p id="quiet" data-live></p><p data-liveliness="no">not live</p>
</body></html>"""


def page(
    *, title: str = "3/60", state: str = "running", now: str = "3 &lt; 4", rows: tuple[str, ...] = ("a", "b")
) -> str:
    shown = "\n".join(f'<tr id="node-{row[0]}"><td>{row}</td></tr>' for row in rows)
    return PAGE.format(title=title, state=state, now=now, rows=shown)


def test_a_page_is_split_at_its_templates_marks() -> None:
    found = rendering(page(title="a &amp; b"))
    assert found.title == "a & b"
    assert found.parts == {
        "state": '<span class="dot">running</span>',
        "now": "<div><p>3 &lt; 4</p></div>",
        "quiet": "",
    }
    assert found.rows == {
        "nodes": {"node-a": '<tr id="node-a"><td>a</td></tr>', "node-b": '<tr id="node-b"><td>b</td></tr>'}
    }


def test_an_empty_viewer_gets_everything_and_a_current_one_nothing() -> None:
    found = rendering(page())
    assert difference({}, found) == {
        "title": "3/60",
        "parts": found.parts,
        "rows": {"nodes": {"changed": found.rows["nodes"], "order": ["node-a", "node-b"]}},
    }
    assert difference(found.marks, rendering(page())) == {}
    assert found.revision == rendering(page()).revision != rendering(page(now="4")).revision


def test_only_changed_parts_are_sent() -> None:
    seen = rendering(page()).marks
    assert difference(seen, rendering(page(state="finished"))) == {
        "parts": {"state": '<span class="dot">finished</span>'}
    }
    assert difference(seen, rendering(page(title="4/60"))) == {"title": "4/60"}
    changed = '<tr id="node-b"><td>b2</td></tr>'
    assert difference(seen, rendering(page(rows=("a", "b2")))) == {"rows": {"nodes": {"changed": {"node-b": changed}}}}
    assert difference(seen, rendering(page(rows=("b", "a")))) == {
        "rows": {"nodes": {"changed": {}, "order": ["node-b", "node-a"]}}
    }
    assert difference(seen, rendering(page(rows=("b",)))) == {"rows": {"nodes": {"changed": {}, "order": ["node-b"]}}}


def test_a_time_that_the_browser_counts_is_no_change() -> None:
    def at(text: str, iso: str = "2026-01-01T00:00:00Z") -> str:
        return page(now=f'<time datetime="{iso}" title="{iso}" data-ago>{text}</time>')

    seen = rendering(at("5 s ago")).marks
    assert difference(seen, rendering(at("6 s ago"))) == {}
    assert difference(seen, rendering(at("6 s ago", "2026-01-01T00:00:01Z"))).keys() == {"parts"}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("<p data-live>x</p>", "without an id"),
        ('<p id="a" data-live>x', "does not end"),
        ('<p id="a" data-live></p><p id="a" data-live></p>', "two live parts"),
        ('<ol id="a" data-live="rows"><li>x</li></ol>', "a row without an id"),
        ('<ol id="a" data-live="rows">x</ol>', "text outside rows"),
    ],
)
def test_a_template_that_is_marked_wrongly_is_found_out(wrong: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        rendering(wrong)


def test_no_template_has_a_bracket_within_a_tag() -> None:
    """Attributes in a template may contain "<" or ">" only inside Jinja's own marks, because the search for live parts
    takes the first ">" after a tag's name as the end of the tag.
    """
    for path in sorted((Path(live_parts.__file__).parent / "templates").glob("*.html")):
        text = re.sub(r"{%.*?%}|{{.*?}}|{#.*?#}", "x", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r'<\w[^<>]*="[^"<>]*[<>]', text), path.name
