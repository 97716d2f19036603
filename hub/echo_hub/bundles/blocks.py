"""Groups and their rollouts as compressed columns: one block is one file of a bundle.

A block is a zstd frame with one MessagePack map from column names to bytes: little-endian arrays, one entry for each
group, rollout, span (tokens that one node drew with one version) or token. Texts are stored once, in the column
`texts`, and other columns hold their places there.

Large groups are split between episodes (all leases of one index). So a checker reads one block at a time, with constant
memory. Blocks come from strangers, so sizes are checked before anything is decompressed or read, and the map holds only
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Any, Final

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from echo_hub.bundles.layout import BLOCK_BYTES
from echo_shared.errors import CodecError
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import MAX_GROUP_SIZE, Checked, DropReason, FinishReason, ReceiptState, rollout_id

BLOCK_ROLLOUTS: Final = 8_192
BLOCK_TOKENS: Final = 1_000_000
"""A block is written as soon as it holds this many rollouts or tokens. Its last episode may exceed the limit."""
NO_PLACE: Final = -1
_LEVEL: Final = 9
_MOST_COLUMNS: Final = 64
_MOST_TEXTS: Final = 65_536
_TEXT_BYTES: Final = 128
_NONE: Final = 0
"""Index of the empty text in the column `texts`. It stands for None."""
_BINARY: Final = frozenset({0xC4, 0xC5, 0xC6})
"""First bytes of MessagePack's binary values."""
_SHORT_TEXT: Final = range(0xA0, 0xC0)
_COLUMNS: Final = {
    "group.group_id": "<i8",
    "group.seed": "<u8",
    "group.step": "<i8",
    "group.prompt_tokens": "<u4",
    "group.rollouts": "<u4",
    "rollout.lease_id": "<i8",
    "rollout.index": "<u4",
    "rollout.turn": "<u4",
    "rollout.policy_version": "<i8",
    "rollout.node": "<u4",
    "rollout.state": "<u4",
    "rollout.drop_reason": "<u4",
    "rollout.checked": "<u4",
    "rollout.finish_reason": "<u4",
    "rollout.reward": "<f8",
    "rollout.turn_reward": "<f8",
    "rollout.num_tokens": "<i8",
    "rollout.place": "<i8",
    "rollout.tokens": "<u4",
    "rollout.observed": "<u4",
    "rollout.spans": "<u4",
    "span.node": "<u4",
    "span.policy_version": "<i8",
    "span.tokens": "<u4",
    "token.id": "<i4",
    "token.logprob": "<f4",
    "prompt.id": "<i4",
    "observed.id": "<i4",
}
_TEXTS: Final = "texts"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledRollout:
    """One lease of a rollout, with its outcome."""

    lease_id: int
    index: int
    turn: int
    node: str
    """Pseudonym of the node that held the lease; "hub" for the hub itself."""
    policy_version: int
    """Version for which the rollout was leased."""
    state: ReceiptState
    drop_reason: DropReason | None
    checked: Checked
    reward: float | None
    turn_reward: float | None
    num_tokens: int | None
    """Number of drawn tokens that the hub recorded; None if the hub received nothing."""
    place: int
    """Place of the rollout in the batch of the group's step; `NO_PLACE` if it is in no batch."""
    payload: RolloutPayload | None
    """The tokens, with spans that cover all of them; None if the hub no longer has them."""

    @property
    def rollout_id(self) -> str:
        return rollout_id(self.lease_id, self.index)

    @property
    def is_used(self) -> bool:
        """True if the run uses the rollout: it was trained on or evaluated, or may still be."""
        return self.state is not ReceiptState.DROPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledGroup:
    """A group, or a part of it, with its leases ordered by index, turn and lease."""

    group_id: int
    seed: int
    """Seed of the group. The seeds of all its draws follow from it."""
    step: int | None
    prompt_ids: NDArray[np.int32]
    rollouts: tuple[BundledRollout, ...]

    def episodes(self) -> Iterator[tuple[BundledRollout, ...]]:
        """Yield all leases of each index, in order."""
        for _, of_index in groupby(self.rollouts, key=lambda one: one.index):
            yield tuple(of_index)


class BlockWriter:
    """Collects groups, and returns full blocks."""

    def __init__(self) -> None:
        self._groups: list[BundledGroup] = []
        self._rollouts = 0
        self._tokens = 0

    def add(self, group: BundledGroup) -> Iterator[bytes]:
        """Add a group. Yield each block that becomes full."""
        part: list[BundledRollout] = []
        for episode in group.episodes():
            part += episode
            self._rollouts += len(episode)
            self._tokens += sum(map(_num_tokens, episode))
            if self._rollouts >= BLOCK_ROLLOUTS or self._tokens + len(group.prompt_ids) >= BLOCK_TOKENS:
                self._take(group, part)
                part = []
                yield self.rest()
        if part:
            self._take(group, part)

    def _take(self, group: BundledGroup, part: Sequence[BundledRollout]) -> None:
        self._tokens += len(group.prompt_ids)
        self._groups.append(
            BundledGroup(
                group_id=group.group_id,
                seed=group.seed,
                step=group.step,
                prompt_ids=group.prompt_ids,
                rollouts=tuple(part),
            )
        )

    def rest(self) -> bytes:
        """Return the groups collected so far as a block, and begin a new one. Return b"" if there are no groups."""
        groups, self._groups, self._rollouts, self._tokens = self._groups, [], 0, 0
        return pack_block(groups) if groups else b""


def _num_tokens(one: BundledRollout) -> int:
    return 0 if one.payload is None else len(one.payload.completion_ids) + len(one.payload.observation_ids)


def pack_block(groups: Sequence[BundledGroup]) -> bytes:
    """Pack groups into one compressed block."""
    texts: dict[str, int] = {"": _NONE}

    def place(text: str | None) -> int:
        return texts.setdefault(text or "", len(texts))

    rollouts = [one for group in groups for one in group.rollouts]
    there = [one.payload for one in rollouts if one.payload is not None]
    spans = [span for payload in there for span in payload.spans]
    values: dict[str, Any] = {
        "group.group_id": [group.group_id for group in groups],
        "group.seed": np.array([group.seed for group in groups], np.uint64),
        "group.step": [group.step or 0 for group in groups],
        "group.prompt_tokens": [len(group.prompt_ids) for group in groups],
        "group.rollouts": [len(group.rollouts) for group in groups],
        "rollout.lease_id": [one.lease_id for one in rollouts],
        "rollout.index": [one.index for one in rollouts],
        "rollout.turn": [one.turn for one in rollouts],
        "rollout.policy_version": [one.policy_version for one in rollouts],
        "rollout.node": [place(one.node) for one in rollouts],
        "rollout.state": [place(one.state) for one in rollouts],
        "rollout.drop_reason": [place(one.drop_reason) for one in rollouts],
        "rollout.checked": [place(one.checked) for one in rollouts],
        "rollout.finish_reason": [
            place(None if one.payload is None else one.payload.finish_reason) for one in rollouts
        ],
        "rollout.reward": [np.nan if one.reward is None else one.reward for one in rollouts],
        "rollout.turn_reward": [np.nan if one.turn_reward is None else one.turn_reward for one in rollouts],
        "rollout.num_tokens": [-1 if one.num_tokens is None else one.num_tokens for one in rollouts],
        "rollout.place": [one.place for one in rollouts],
        "rollout.tokens": [0 if one.payload is None else len(one.payload.completion_ids) for one in rollouts],
        "rollout.observed": [0 if one.payload is None else len(one.payload.observation_ids) for one in rollouts],
        "rollout.spans": [0 if one.payload is None else len(one.payload.spans) for one in rollouts],
        "span.node": [place(span.node_id) for span in spans],
        "span.policy_version": [span.policy_version for span in spans],
        "span.tokens": [span.num_tokens for span in spans],
        "token.id": _joined([payload.completion_ids for payload in there]),
        "token.logprob": _joined([payload.behavior_logprobs for payload in there]),
        "prompt.id": _joined([group.prompt_ids for group in groups]),
        "observed.id": _joined([payload.observation_ids for payload in there]),
    }
    columns = {name: np.asarray(values[name]).astype(dtype).tobytes() for name, dtype in _COLUMNS.items()}
    packed = msgpack.packb({_TEXTS: "\n".join(texts).encode(), **columns})
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(packed)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0)


def unpack_block(content: bytes) -> list[BundledGroup]:
    """Return the groups of a block. Raises CodecError if the block is damaged or breaks the format."""
    columns = _Columns(_decompressed(content))
    rollouts = columns.rollouts()
    prompts = columns.parts("prompt.id", columns["group.prompt_tokens"])
    counts = columns["group.rollouts"].tolist()
    if sum(counts) != len(rollouts) or 0 in counts:
        raise _broken(f"{len(rollouts)} rollouts, {sum(counts)} in its groups")
    found, end = [], 0
    for group_id, seed, step, prompt_ids, count in zip(
        *(columns[f"group.{name}"].tolist() for name in ("group_id", "seed", "step")), prompts, counts, strict=True
    ):
        of_group = tuple(rollouts[end : end + count])
        end += count
        if not len(prompt_ids) or group_id < 0 or step < 0:
            raise _broken(f"group {group_id} of step {step} with {len(prompt_ids)} prompt tokens")
        found.append(
            BundledGroup(group_id=group_id, seed=seed, step=step or None, prompt_ids=prompt_ids, rollouts=of_group)
        )
    return found


class _Columns:
    """The columns of a block, while it is unpacked. Raises CodecError if their lengths do not agree."""

    def __init__(self, packed: bytes) -> None:
        found = _bytes_of(packed)
        if found.keys() != {_TEXTS, *_COLUMNS}:
            raise _broken(f"the columns {', '.join(sorted(found))[:200]}")
        self._columns = {name: _array(name, found[name]) for name in _COLUMNS}
        for kind in ("group", "rollout", "span"):
            if len({len(column) for name, column in self._columns.items() if name.startswith(f"{kind}.")}) != 1:
                raise _broken(f"columns of {kind}s that have different lengths")
        try:
            self._texts = found[_TEXTS].decode().split("\n")
        except UnicodeDecodeError as error:
            raise _broken(f"texts that are not UTF-8: {error.reason}") from error
        if len(self._texts) > _MOST_TEXTS or max(map(len, self._texts)) > _TEXT_BYTES:
            raise _broken(f"{len(self._texts)} texts, or one that is too long")

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name]

    def texts(self, name: str) -> list[str]:
        places = self[name]
        if len(places) and int(places.max()) >= len(self._texts):
            raise _broken(f"{name}: place {int(places.max())} of {len(self._texts)} texts")
        return [self._texts[place] for place in places.tolist()]

    def parts(self, name: str, lengths: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the column split into parts of these lengths."""
        ends = np.cumsum(lengths, dtype=np.int64)
        column = self[name]
        if (int(ends[-1]) if len(ends) else 0) != len(column):
            raise _broken(f"{name}: {len(column)} values instead of {int(ends[-1]) if len(ends) else 0}")
        return [column[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]

    def rollouts(self) -> list[BundledRollout]:
        numbers = {
            name: self[f"rollout.{name}"].tolist()
            for name in ("lease_id", "index", "turn", "policy_version", "num_tokens", "place", "reward", "turn_reward")
        }
        words = {
            name: self.texts(f"rollout.{name}") for name in ("node", "state", "drop_reason", "checked", "finish_reason")
        }
        payloads = self._payloads(words["finish_reason"])
        try:
            return [
                BundledRollout(
                    lease_id=_natural(lease_id),
                    index=_natural(index, below=MAX_GROUP_SIZE),
                    turn=turn,
                    node=node,
                    policy_version=_natural(version),
                    state=ReceiptState(state),
                    drop_reason=DropReason(reason) if reason else None,
                    checked=Checked(checked),
                    reward=_number(reward),
                    turn_reward=_number(turn_reward),
                    num_tokens=None if num_tokens < 0 else num_tokens,
                    place=max(place, NO_PLACE),
                    payload=payload,
                )
                for (
                    (lease_id, index, turn, version, num_tokens, place, reward, turn_reward),
                    (node, state, reason, checked, _),
                    payload,
                ) in zip(zip(*numbers.values(), strict=True), zip(*words.values(), strict=True), payloads, strict=True)
            ]
        except ValueError as error:
            raise _broken(str(error)) from error

    def _payloads(self, reasons: Sequence[str]) -> Iterator[RolloutPayload | None]:
        lengths, observed = self["rollout.tokens"], self["rollout.observed"]
        ids, logprobs = self.parts("token.id", lengths), self.parts("token.logprob", lengths)
        answers = self.parts("observed.id", observed)
        spans = self._spans()
        for reason, of_ids, of_logprobs, answer, of_spans in zip(reasons, ids, logprobs, answers, spans, strict=True):
            if not len(of_ids):
                yield None
                continue
            if sum(span.num_tokens for span in of_spans) != len(of_ids) or min(s.num_tokens for s in of_spans) < 1:
                raise _broken(f"spans of {[span.num_tokens for span in of_spans][:16]} for {len(of_ids)} tokens")
            if not np.isfinite(of_logprobs).all():
                raise _broken("a claimed log-probability that is not finite")
            yield RolloutPayload(
                completion_ids=of_ids,
                behavior_logprobs=of_logprobs,
                finish_reason=FinishReason(reason),
                sampling_s=0.0,
                observation_ids=answer,
                spans=of_spans,
            )

    def _spans(self) -> Iterator[tuple[DrawnSpan, ...]]:
        nodes = self.texts("span.node")
        versions, counts = self["span.policy_version"].tolist(), self["span.tokens"].tolist()
        spans = [
            DrawnSpan(node_id=node, policy_version=_natural(version), num_tokens=count)
            for node, version, count in zip(nodes, versions, counts, strict=True)
        ]
        of_rollouts = self["rollout.spans"].tolist()
        if sum(of_rollouts) != len(spans):
            raise _broken(f"{len(spans)} spans, {sum(of_rollouts)} in its rollouts")
        end = 0
        for count in of_rollouts:
            yield tuple(spans[end : end + count])
            end += count


def _decompressed(content: bytes) -> bytes:
    try:
        declared = zstandard.frame_content_size(content)
        if not 0 < declared <= BLOCK_BYTES:
            raise _broken(f"it declares {declared} bytes, at most {BLOCK_BYTES} are allowed")
        return zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES).decompress(content, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _broken(str(error)) from error


def _bytes_of(packed: bytes) -> dict[str, bytes]:
    """Return the map in `packed`, whose keys must be short texts and whose values must be bytes."""
    unpacker = msgpack.Unpacker(read_size=len(packed), max_buffer_size=len(packed))
    unpacker.feed(packed)
    found: dict[str, bytes] = {}
    try:
        number = unpacker.read_map_header()
        if number > _MOST_COLUMNS:
            raise _broken(f"a map of {number} columns")
        for _ in repeat(None, number):
            key = _next(packed, unpacker, _SHORT_TEXT)
            found[key] = _next(packed, unpacker, _BINARY)
    except (ValueError, msgpack.UnpackException, UnicodeDecodeError) as error:
        raise _broken(f"it is not MessagePack: {error}") from error
    if unpacker.tell() != len(packed):
        raise _broken("bytes follow its end")
    return found


def _next(packed: bytes, unpacker: msgpack.Unpacker, allowed: Iterable[int]) -> Any:
    at = unpacker.tell()
    if at >= len(packed) or packed[at] not in allowed:
        raise ValueError("a column is not bytes, or its name is not a short text")
    return unpacker.unpack()


def _array(name: str, content: bytes) -> NDArray[Any]:
    dtype = np.dtype(_COLUMNS[name])
    if len(content) % dtype.itemsize:
        raise _broken(f"{name}: {len(content)} bytes")
    return np.frombuffer(content, dtype)


def _natural(number: int, *, below: int = 2**62) -> int:
    if not 0 <= number < below:
        raise ValueError(f"the number {number}, which must be at least 0 and below {below}")
    return number


def _number(value: float) -> float | None:
    """Return a stored reward; None if it is NaN, which stands for no reward."""
    if np.isinf(value):
        raise ValueError("a reward that is not finite")
    return None if np.isnan(value) else value


def _broken(got: str) -> CodecError:
    return CodecError("A file of rollouts in the bundle is damaged.", got=got)
