import hashlib
from pathlib import Path

import libtorrent as lt
import pytest

from echo_shared.errors import CodecError, SwarmError
from echo_shared.swarm import bencode
from echo_shared.swarm.torrent import FileSlice, make_torrent, piece_bytes_for, read_torrent


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run-v000001"
    (directory / "sub").mkdir(parents=True)
    (directory / "b.json").write_bytes(b"x" * 100)
    (directory / "sub" / "weights.safetensors").write_bytes(bytes(range(256)) * 400)
    (directory / "empty.txt").touch()
    return directory


def test_is_private_named_after_the_directory_and_read_by_libtorrent_alike(directory: Path) -> None:
    torrent = make_torrent(directory)
    info = lt.load_torrent_buffer(torrent.torrent).ti
    layout = read_torrent(torrent.torrent)
    assert info is not None
    assert info.priv()
    assert info.info_hashes().v1.to_bytes() == torrent.info_hash == layout.info_hash
    assert info.name() == layout.name == "run-v000001"
    assert info.num_pieces() == len(layout.piece_hashes)
    assert layout.files == (("b.json", 100), ("empty.txt", 0), ("sub/weights.safetensors", 102_400))


def test_the_same_directory_makes_the_same_torrent(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / directory.name
    (copy / "sub").mkdir(parents=True)
    # Create the files in another order than the torrent's.
    for name in ("sub/weights.safetensors", "empty.txt", "b.json"):
        (copy / name).write_bytes((directory / name).read_bytes())
    assert make_torrent(copy) == make_torrent(directory)


def test_slices_of_all_pieces_hash_to_the_piece_hashes(directory: Path) -> None:
    layout = read_torrent(make_torrent(directory).torrent)
    for piece, expected in enumerate(layout.piece_hashes):
        data = b"".join(_read(directory, part) for part in layout.slices(piece, piece + 1))
        assert len(data) == layout.size_of_piece(piece)
        assert hashlib.sha1(data).digest() == expected
    whole = list(layout.slices(0, len(layout.piece_hashes)))
    assert [(part.path, part.length) for part in whole] == [("b.json", 100), ("sub/weights.safetensors", 102_400)]


def _read(directory: Path, part: FileSlice) -> bytes:
    return (directory / part.path).read_bytes()[part.offset : part.offset + part.length]


@pytest.mark.parametrize(
    ("size", "piece_bytes"),
    [
        (1, 16_384),
        (500_000, 16_384),
        (8_000_000, 32_768),
        (2**23, 65_536),
        (2**31, 65_536),
        (2**31 + 1, 131_072),
        (2**36, 2**21),
    ],
)
def test_piece_size_follows_the_payload(size: int, piece_bytes: int) -> None:
    assert piece_bytes_for(size) == piece_bytes


def test_fits_compares_names_and_sizes(directory: Path) -> None:
    layout = read_torrent(make_torrent(directory).torrent)
    assert layout.fits(directory)
    (directory / "b.json").write_bytes(b"short")
    assert not layout.fits(directory)
    (directory / "b.json").unlink()
    assert not layout.fits(directory)


def test_an_empty_directory_has_no_torrent(tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match="without any bytes"):
        make_torrent(tmp_path)


@pytest.mark.parametrize(
    "part", [b"..", b".", b"", b"a/b", b"a\\b", b"c:", b"\xff", b"nul\x00", b"a ", b"CON", b"aux.x"]
)
def test_an_invalid_path_or_one_outside_the_directory_is_refused(part: bytes) -> None:
    with pytest.raises(CodecError):
        read_torrent(_torrent(path=[part]))
    with pytest.raises(CodecError):
        read_torrent(_torrent(name=part))


@pytest.mark.parametrize(
    "torrent",
    [
        b"",
        b"le",
        b"de",
        bencode.encode({"info": 1}),
        bencode.encode({"info": {"name": "a", "piece length": 16384, "pieces": b"0" * 20}}),
    ],
)
def test_invalid_torrents_are_refused(torrent: bytes) -> None:
    with pytest.raises(CodecError):
        read_torrent(torrent)


def test_as_many_hashes_as_pieces(directory: Path) -> None:
    read_torrent(_torrent())
    with pytest.raises(CodecError, match="not valid"):
        read_torrent(_torrent(pieces=b"0" * 40))
    with pytest.raises(CodecError, match="not valid"):
        read_torrent(_torrent(length=2**60))


def _torrent(
    *, name: bytes = b"a", path: list[bytes] | None = None, length: int = 5, pieces: bytes = b"0" * 20
) -> bytes:
    files: list[bencode.Encodable] = [{"length": length, "path": path or [b"b"]}]
    return bencode.encode({"info": info_of(files=files, name=name, pieces=pieces)})


def info_of(**changes: bencode.Encodable) -> dict[str, bencode.Encodable]:
    files: list[bencode.Encodable] = [{"length": 5, "path": [b"b"]}]
    return {"files": files, "name": b"a", "piece length": 16_384, "pieces": b"0" * 20, "private": 1, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"name.utf-8": b"other-base"},
        {"length": 5},
        {"file tree": {}},
        {"meta version": 2},
        {"source": b"x"},
        {"private": 0},
        {"files": [{"length": 5, "path": [b"b"], "path.utf-8": [b"c"]}]},
        {"files": [{"length": 5, "path": [b"b"], "attr": b"l", "symlink path": [b"c"]}]},
    ],
)
def test_info_fields_with_a_meaning_for_other_clients_are_refused(changes: dict[str, bencode.Encodable]) -> None:
    with pytest.raises(CodecError):
        read_torrent(bencode.encode({"info": info_of(**changes)}))


def test_a_torrent_that_is_not_marked_private_is_refused() -> None:
    info = info_of()
    del info["private"]
    with pytest.raises(CodecError):
        read_torrent(bencode.encode({"info": info}))


def test_only_the_info_dictionary_is_kept(directory: Path) -> None:
    made = make_torrent(directory)
    decoded = bencode.decode(made.torrent)
    assert isinstance(decoded, dict)
    more = {"announce": b"http://192.168.1.1/", "nodes": [[b"192.168.1.1", 1]], "url-list": b"http://192.168.1.1/"}
    layout = read_torrent(bencode.encode({**decoded, **more}))
    assert layout.torrent == made.torrent and layout.info_hash == made.info_hash
