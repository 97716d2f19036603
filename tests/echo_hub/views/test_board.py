"""Simultaneous requests of many clients for the leaderboard read the database only once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from echo_hub.store.board import read_board
from echo_hub.store.store import Store
from echo_hub.views import board as board_module
from echo_hub.views.board import HubBoard
from echo_shared.errors import StorageError
from echo_shared.records.credit import Board, BoardQuery


class Books(Store):
    def __init__(self) -> None:
        self.asked: list[BoardQuery] = []
        self.fails = False

    def read(self, query: Any, wanted: BoardQuery, now: float) -> Any:
        assert query is read_board
        self.asked.append(wanted)
        if self.fails:
            raise StorageError("The hub's database cannot be read.")
        return Board(rows=(), num_found=len(self.asked), num_ranked=0)


async def test_the_same_question_is_asked_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    books, loop = Books(), asyncio.get_running_loop()
    board, began, passed = HubBoard(books), loop.time(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: began + passed[0])
    answers = await asyncio.gather(*(board.board(BoardQuery()) for _ in range(50)))
    assert len(books.asked) == 1 and {answer.num_found for answer in answers} == {1}
    await board.board(BoardQuery(after=100))
    assert len(books.asked) == 2
    passed[0] += board_module.LEAST_S + 0.1
    await board.board(BoardQuery())
    assert len(books.asked) == 3


async def test_a_failure_is_not_kept() -> None:
    books = Books()
    board = HubBoard(books)
    books.fails = True
    with pytest.raises(StorageError):
        await board.board(BoardQuery())
    books.fails = False
    assert (await board.board(BoardQuery())).num_found == 2


async def test_of_many_questions_the_newest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "MOST_KEPT", 3)
    board = HubBoard(Books())
    for number in range(10):
        await board.board(BoardQuery(search=str(number)))
    assert len(board._answers) == 3


async def test_the_board_equals_the_stores(hub: Any) -> None:
    await hub.join("a")
    await hub.join("b", capacity=0)
    await hub.train_to_the_end()
    board = HubBoard(hub.driven.store)
    (row,) = (await board.board(BoardQuery())).rows
    assert (row.rank, row.node, row.share, row.rollouts, row.tokens, row.steps) == (1, "a", 1.0, 8, 24, 2)
    assert (row.work.trained_rollouts, row.work.trained_tokens) == (8, 24)
    found = await board.node("a")
    assert found is not None and found[0] == "a" and await board.node("b") is None
    assert {step: share.share for step, share in (await board.shares("a", 1)).items()} == {0: 1.0, 1: 1.0}
    assert await board.team("none") is None and await board.receipt("999-0") is None
