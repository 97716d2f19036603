from __future__ import annotations

from echo_hub.dashboard.board import MOST_SEARCHED, board_query, page_links, sort_of
from echo_shared.records.credit import Board, BoardQuery


def test_a_query_is_read_from_the_address() -> None:
    wanted = board_query({"sort": "-recent", "q": "  ada \0 b ", "after": "200"}, kind="node")
    assert wanted == BoardQuery(kind="node", order="recent", reverse=True, search="ada b", after=200)
    assert sort_of(wanted) == "-recent"


def test_invalid_query_values_are_ignored() -> None:
    wrong = {"sort": "rank; DROP TABLE", "q": "x" * 1_000, "after": "-1"}
    assert board_query(wrong, kind="team") == BoardQuery(kind="team", search="x" * MOST_SEARCHED)


def test_pages_lead_to_their_neighbours() -> None:
    board = Board(rows=(), num_found=0, num_ranked=0)
    assert page_links(BoardQuery(), board) == ("", "")
    assert page_links(BoardQuery(after=50, search="a&b"), board) == ("?sort=rank&q=a%26b#table", "")
