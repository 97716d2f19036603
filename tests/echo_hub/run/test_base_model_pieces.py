"""Texts of single tokens as pages show them, with special tokens written out."""

from __future__ import annotations

import pytest

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import MOST_A_CHARACTER, PromptCodec
from tests.echo_hub.written_rollouts import codec_of_bytes


def test_pieces_are_tokens_and_multi_token_characters() -> None:
    codec = codec_of_bytes()
    text = "a<b>é日🌊"
    ids = [*codec.encode_prompt(text).tolist(), *codec.stop_ids]
    pieces = codec.pieces(ids)
    assert pieces == [(c, 1) for c in "a<b>"] + [("é", 2), ("日", 3), ("🌊", 4), ("<end>", 1)]
    assert codec.text(ids) == f"{text}<end>" and codec.text([]) == "" and codec.pieces([]) == []


@pytest.mark.parametrize("strange", [-1, 2**31 - 1, 257])
def test_an_unknown_id_is_shown_as_its_number(strange: int) -> None:
    codec = codec_of_bytes()
    first, *rest = codec.encode_prompt("é!").tolist()
    pieces = codec.pieces([*codec.encode_prompt("ok").tolist(), first, strange, *rest])
    assert pieces[:2] == [("o", 1), ("k", 1)] and pieces[3] == (f"⟨{strange}⟩", 1) and pieces[-1][0].endswith("!")
    assert sum(count for _, count in pieces) == 6
    assert codec.text([strange]) == f"⟨{strange}⟩"


def test_invalid_bytes_do_not_delay_the_following_text() -> None:
    codec = codec_of_bytes()
    half = codec.encode_prompt("é").tolist()[0]
    pieces = codec.pieces([half] * 20 + codec.encode_prompt("end").tolist())
    assert sum(count for _, count in pieces) == 23
    assert max(count for _, count in pieces) <= MOST_A_CHARACTER
    assert "".join(text for text, _ in pieces).endswith("end")


def test_the_builtin_models_pieces_are_its_text() -> None:
    codec = PromptCodec.load(resolve_base("builtin:tiny"))
    ids = [*codec.encode_prompt("12+3= <b>").tolist(), *codec.stop_ids]
    assert "".join(text for text, _ in codec.pieces(ids)) == codec.text(ids)
    assert codec.text(ids).startswith("12+3= <b>")
