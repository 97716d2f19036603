"""Files of a torrent, written piece by piece: resumed, refused, on a full disk, and completed by libtorrent."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from echo_shared.errors import CodecError, StorageError, SwarmError
from echo_shared.swarm import SwarmSettings, make_torrent, open_swarm, read_torrent
from echo_shared.swarm.piece_file import GIVEN_UP, ArrivingFile, PieceFile
from echo_shared.swarm.torrent import TorrentLayout


def pieces_of(layout: TorrentLayout, directory: Path) -> list[bytes]:
    whole = b"".join((directory / path).read_bytes() for path, _ in layout.files)
    return [whole[i : i + layout.piece_bytes] for i in range(0, len(whole), layout.piece_bytes)]


def open_at(layout: TorrentLayout, parent: Path) -> PieceFile:
    file = PieceFile(layout, parent)
    file.open()
    return file


def test_pieces_in_any_order_make_the_directory(payload, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    pieces = pieces_of(layout, payload.directory)
    file = open_at(layout, tmp_path / "node")
    assert (file.done_bytes, file.complete, len(file.missing)) == (0, False, len(pieces))
    order = list(range(len(pieces)))
    random.Random(2).shuffle(order)
    for index in order:
        assert file.write(index, pieces[index])
        assert not file.write(index, pieces[index])
    assert (file.done_bytes, file.complete) == (payload.total_bytes, True)
    file.close()
    file.close()
    assert payload.matches(file.directory)


def test_wrong_pieces_are_refused_and_not_written(payload, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    pieces = pieces_of(layout, payload.directory)
    file = open_at(layout, tmp_path / "node")
    wrong = [(0, pieces[1]), (0, pieces[0][:-1]), (0, pieces[0] + b"x"), (0, b""), (-1, pieces[-1])]
    for index, data in [*wrong, (len(pieces), pieces[0])]:
        with pytest.raises(CodecError, match="does not match its hash"):
            file.write(index, data)
    assert file.write(0, pieces[0])
    with pytest.raises(CodecError):
        file.write(0, pieces[1])
    assert file.done_bytes == len(pieces[0])
    file.close()
    assert (file.directory / layout.files[1][0]).read_bytes()[len(pieces[0]) :].strip(b"\0") == b""


def test_valid_pieces_on_the_disk_are_kept(payload, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    pieces = pieces_of(layout, payload.directory)
    first = open_at(layout, tmp_path / "node")
    for index in (0, 3, 5):
        first.write(index, pieces[index])
    first.close()
    weights = first.directory / "adapter_model.safetensors"
    with weights.open("r+b") as damaged:
        damaged.seek(5 * layout.piece_bytes)
        damaged.write(b"damage")
        damaged.seek(0, 2)
        damaged.write(b"and more than there should be")
    second = open_at(layout, tmp_path / "node")
    assert second.missing == set(range(len(pieces))) - {0, 3}
    assert second.done_bytes == 2 * layout.piece_bytes
    for index in sorted(second.missing):
        second.write(index, pieces[index])
    second.close()
    assert payload.matches(second.directory)


def test_a_complete_directory_is_complete(payload, tmp_path) -> None:
    payload.copy_to(tmp_path / "node")
    file = open_at(read_torrent(payload.torrent.torrent), tmp_path / "node")
    assert (file.complete, file.done_bytes) == (True, payload.total_bytes)


def test_pieces_that_span_many_files(tmp_path) -> None:
    directory = tmp_path / "hub" / "base"
    (directory / "sub").mkdir(parents=True)
    for index in range(40):
        (directory / f"{index:02}.json").write_bytes(bytes([index]) * (index * 1_000))
    (directory / "sub" / "end.txt").write_bytes(b"end")
    layout = read_torrent(make_torrent(directory).torrent)
    file = open_at(layout, tmp_path / "node")
    for index, data in reversed(list(enumerate(pieces_of(layout, directory)))):
        assert file.write(index, data)
    file.close()
    assert open_at(layout, tmp_path / "node").complete


async def test_libtorrent_continues_the_download(payload, web_server, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    pieces = pieces_of(layout, payload.directory)
    file = open_at(layout, tmp_path / "node")
    half = range(0, len(pieces), 2)
    for index in half:
        file.write(index, pieces[index])
    file.close()
    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1", web_seed_after_s=0))
    stats = await swarm.fetch(payload.torrent.torrent, tmp_path / "node", web_seed_url=web_server.url)
    await swarm.close()
    assert payload.matches(file.directory)
    assert stats.web_seed_bytes <= payload.total_bytes - sum(len(pieces[index]) for index in half)


def test_a_full_disk_is_reported_and_the_rest_continues_later(payload, small_disk) -> None:
    layout = read_torrent(payload.torrent.torrent)
    pieces = pieces_of(layout, payload.directory)
    file = open_at(layout, small_disk.directory)
    small_disk.fill(leave_bytes=3 * layout.piece_bytes)
    with pytest.raises(StorageError, match="disk is full"):
        for index, data in enumerate(pieces):
            file.write(index, data)
    assert 0 < file.done_bytes < payload.total_bytes
    small_disk.empty()
    for index in sorted(file.missing):
        file.write(index, pieces[index])
    file.close()
    assert payload.matches(file.directory)


def test_where_no_directory_can_be_is_a_storage_error(payload, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        open_at(read_torrent(payload.torrent.torrent), tmp_path / "file")


def test_files_that_vanish_are_a_storage_error(payload, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    file = open_at(layout, tmp_path / "node")
    (file.directory / layout.files[0][0]).unlink()
    with pytest.raises(StorageError):
        file.write(0, pieces_of(layout, payload.directory)[0])


def test_files_have_their_size_and_their_end_from_the_start(payload, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    directory = tmp_path / "node" / layout.name
    (path, size), *_ = layout.files
    for had in (0, 1, size - 1, size, size + 1):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(b"x" * had)
        open_at(layout, tmp_path / "node")
        assert (directory / path).read_bytes() == (b"x" * had)[:size].ljust(size, b"\0")
    assert [(directory / path).stat().st_size for path, _ in layout.files] == [size for _, size in layout.files]


def test_the_file_knows_its_pieces(payload, tmp_path) -> None:
    layout = read_torrent(payload.torrent.torrent)
    file = open_at(layout, tmp_path / "node")
    file.write(1, pieces_of(layout, payload.directory)[1])
    assert [file.has(index) for index in (-1, 0, 1, len(layout.piece_hashes))] == [False, False, True, False]
    file.close()


def one_file(directory: Path) -> tuple[TorrentLayout, list[bytes]]:
    directory.mkdir(parents=True)
    (directory / "payload.sealed").write_bytes(random.Random(3).randbytes(300_000))
    layout = read_torrent(make_torrent(directory).torrent)
    return layout, pieces_of(layout, directory)


def test_another_thread_reads_the_first_file_while_it_arrives(tmp_path) -> None:
    layout, pieces = one_file(tmp_path / "hub" / "run-v000001.k")
    file = open_at(layout, tmp_path / "node")
    with ThreadPoolExecutor(1) as reader, closing(ArrivingFile(file)) as arriving:
        read = reader.submit(lambda: b"".join(iter(lambda: arriving.read(10_000), b"")))
        for index in reversed(range(1, len(pieces))):
            file.write(index, pieces[index])
            assert not read.done(), "the reader waits for the first piece"
        file.write(0, pieces[0])
        assert read.result() == b"".join(pieces)
    file.close()


def test_giving_up_ends_a_waiting_read_with_an_error(tmp_path) -> None:
    layout, pieces = one_file(tmp_path / "hub" / "run-v000001.k")
    file = open_at(layout, tmp_path / "node")
    file.write(0, pieces[0])
    with ThreadPoolExecutor(1) as reader, closing(ArrivingFile(file)) as arriving:
        read = reader.submit(lambda: b"".join(iter(lambda: arriving.read(1_000), b"")))
        file.give_up()
        with pytest.raises(SwarmError) as refused:
            read.result()
    file.close()
    assert refused.value.code == GIVEN_UP
    with closing(ArrivingFile(file)) as arriving:
        assert arriving.read(1) == pieces[0][:1], "arrived pieces can still be read"
