from __future__ import annotations

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.plain_prompts import plain_prompts


def test_prompts_differ_and_leave_room_in_the_smallest_base() -> None:
    codec = PromptCodec.load(resolve_base("builtin:tiny"))
    prompts = plain_prompts(codec)
    assert len({tuple(ids.tolist()) for ids in prompts}) == 256
    assert max(map(len, prompts)) < codec.context_tokens // 2
    assert len({codec.decode(ids)[:8] for ids in prompts[:16]}) > 8
