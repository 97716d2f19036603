from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.learner.cuts import FILE, ChunkSizes, Cuts

PLACE = "a device"


def cut(tokens: int) -> ChunkSizes:
    return ChunkSizes(micro_batch_tokens=tokens, gradient_checkpointing=tokens < 100)


def tokens_at(cuts: Cuts, *steps: int) -> list[int | None]:
    found = [cuts.at(step) for step in steps]
    return [one and one.micro_batch_tokens for one in found]


def test_a_cut_holds_from_its_step_on_also_after_a_restart(tmp_path: Path) -> None:
    cuts = Cuts(tmp_path / "checkpoints", place=PLACE)
    assert tokens_at(cuts, 1) == [None]
    cuts.put(3, cut(400), write=False)
    assert not list(tmp_path.iterdir())
    cuts.put(5, cut(99))
    again = Cuts.read(tmp_path / "checkpoints", place=PLACE)
    for one in (cuts, again):
        assert tokens_at(one, 2, 3, 4, 5, 60) == [None, 400, 400, 99, 99]
    assert again.at(5) == cut(99)
    again.put(4, cut(200))
    assert tokens_at(again, 3, 4, 5) == [400, 200, 200], "later cuts are dropped"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [FILE]


def test_another_rank_reads_the_cuts(tmp_path: Path) -> None:
    cuts, other = Cuts(tmp_path / "a", place=PLACE), Cuts(tmp_path / "b")
    cuts.put(1, cut(400))
    other.take(cuts.frame())
    other.put(2, cut(99))
    assert tokens_at(Cuts.read(tmp_path / "b", place=PLACE), 1, 2) == [400, 99]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "7",
        '{"place": "a device"}',
        '{"place": "a device", "cuts": []}',
        '{"place": "a device", "cuts": {"1": {}}}',
        '{"place": "a device", "cuts": {"x": {"micro_batch_tokens": 5, "gradient_checkpointing": true}}}',
        '{"place": "a device", "cuts": {"1": {"micro_batch_tokens": -5, "gradient_checkpointing": true}}}',
        '{"place": "a device", "cuts": {"1": {"micro_batch_tokens": NaN, "gradient_checkpointing": true}}}',
        '{"place": "another", "cuts": {"1": {"micro_batch_tokens": 5, "gradient_checkpointing": true}}}',
        "[" * 100_000,
    ],
)
def test_a_broken_or_foreign_file_counts_as_missing(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert tokens_at(Cuts.read(tmp_path, place=PLACE), 1, 9) == [None, None]


def test_without_a_writable_run_only_the_stored_cuts_are_lost(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere" / "checkpoints", tmp_path / "file" / "checkpoints"):
        (tmp_path / "file").touch()
        cuts = Cuts(place, place=PLACE)
        cuts.put(1, cut(400))
        assert tokens_at(cuts, 1) == [400]
    (tmp_path / "checkpoints").touch()
    Cuts(tmp_path / "checkpoints", place=PLACE).put(1, cut(400))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "file"]
