"""JSON bodies of the Tinker API. An unknown field is refused by its name: an ignored option could change the result."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, Literal, TypeVar

from aiohttp import hdrs, web
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from echo_hub.tenants.refusal import Refusal, RefusalKind

MOST_JSON_BYTES: Final = 64 * 1024
MOST_PROMPT_BYTES: Final = 2 * 2**20
"""Maximum size of a body with a prompt: a token takes up to 7 characters."""
_MOST_READ_BYTES: Final = 256 * 2**20
"""Maximum size of all bodies of all tenants together that are being read or decoded."""
_MOST_READ_OF_TENANT: Final = 80 * 2**20
_ALWAYS_READ_OF_TENANT: Final = 8 * 2**20
"""Bytes that each tenant may send at any time, so that other tenants with large bodies cannot shut it out."""
LEAST_BYTES_PER_S: Final = 16 * 2**10
"""Slowest rate at which a body may arrive, in bytes per second. A slower body would occupy memory for hours."""
GRACE_S: Final = 30.0
"""Seconds that a body may take in addition to the time that the slowest rate allows."""
_MOST_TOKEN: Final = 2**31 - 1
_LONGEST_NAME: Final = 200
MOST_CHUNKS: Final = 16_384
"""Maximum number of chunks in one prompt: decoding runs on the event loop and must be short."""

Id = Annotated[str, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""Seed of an adapter's random numbers, within the range of the database's integers."""
SeqId = Annotated[int, Field(ge=0, lt=2**63)]
WeightsName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
TtlSeconds = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Metadata = dict[str, Any]


class TinkerBody(BaseModel):
    """Base of all bodies. `type` repeats the route's name."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())
    type: str = ""


class CreateSession(TinkerBody):
    model_config = ConfigDict(extra="ignore")

    tags: tuple[str, ...] = Field(default=(), max_length=64, strict=False)
    user_metadata: Metadata | None = None
    sdk_version: str = Field(default="", max_length=64)
    project_id: str | None = Field(default=None, max_length=256)
    display_name: str | None = Field(default=None, max_length=256)


class SessionBody(TinkerBody):
    session_id: Id


class OptimizerConfig(BaseModel):
    type: str = "adamw"


class LoraConfig(TinkerBody):
    rank: Annotated[int, Field(ge=1, le=1_024)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(TinkerBody):
    session_id: Id
    model_seq_id: SeqId
    base_model: Id
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelBody(TinkerBody):
    model_id: Id


class TrainingIdentity(BaseModel):
    """Model id and number (seq_id) of a training request, read from a body whose other fields are not checked."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model_id: Id
    seq_id: SeqId


class AdamParameters(TinkerBody):
    learning_rate: NotNegative = 1e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: NotNegative = 1e-12
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class OptimStep(TinkerBody):
    model_id: Id
    seq_id: SeqId
    adam_params: AdamParameters | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(TinkerBody):
    model_id: Id
    seq_id: SeqId
    path: WeightsName
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(TinkerBody):
    model_id: Id
    seq_id: SeqId
    path: WeightsName | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Metadata | None = None


class SaveWeightsExternal(TinkerBody):
    model_id: Id
    seq_id: SeqId
    path: WeightsName
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: tuple[str, ...] | None = Field(default=None, max_length=16, strict=False)


class LoadWeights(TinkerBody):
    path: Id
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: SeqId | None = None
    base_model: Id | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    weights_access_token: str | None = None


class CreateSampler(TinkerBody):
    session_id: Id
    sampling_session_seq_id: SeqId
    base_model: Id | None = None
    model_path: Id | None = None


class Chunk(BaseModel):
    """A chunk of a prompt. Only chunks of text have tokens; others are refused by their type."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str = "encoded_text"
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=_MOST_TOKEN)]], Field(fail_fast=True)] = Field(
        default_factory=list
    )


class PromptChunks(TinkerBody):
    chunks: Annotated[list[Chunk], Field(fail_fast=True, max_length=MOST_CHUNKS)]


class SamplingParams(TinkerBody):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[int], Field(fail_fast=True)] | None = None
    temperature: NotNegative = 1.0
    top_k: int = -1
    top_p: Finite = 1.0


class AskSample(TinkerBody):
    sampling_session_id: Id
    seq_id: SeqId
    num_samples: Annotated[int, Field(ge=1, le=1_024)] = 1
    prompt: PromptChunks
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=128)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class FutureBody(TinkerBody):
    request_id: Id
    allow_metadata_only: bool = False


class FuturesTarget(TinkerBody):
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=2**33)] = 0
    """Number of the sampler's copy (clone). Each copy uses its own block of a billion sequence numbers; all are smaller
    than 2**63."""


class FuturesBody(TinkerBody):
    target: FuturesTarget
    prev_cursor: SeqId = 0
    timeout: NotNegative | None = None
    retrieved_request_ids: list[Id] = Field(default_factory=list, max_length=4_096)


class WeightsInfoBody(TinkerBody):
    tinker_path: Id = Field(validation_alias=AliasChoices("tinker_path", "path"))


class NewTtl(TinkerBody):
    ttl_seconds: TtlSeconds | None = None


Body = TypeVar("Body", bound=BaseModel)


class BodyRoom:
    """Limits the memory of request bodies while the hub reads and decodes them: in total, and for each tenant."""

    def __init__(self) -> None:
        self._total = 0
        self._of_tenant: dict[str, int] = {}

    @property
    def num_held_bytes(self) -> int:
        """Number of bytes of bodies for which memory is reserved now."""
        return self._total

    @asynccontextmanager
    async def reading(self, tenant_id: str, request: web.Request, most: int) -> AsyncIterator[bytes]:
        """Read the request's body of at most `most` bytes. Its memory stays reserved within this context. Raises
        Refusal."""
        size = most if request.content_length is None else request.content_length
        if size > most:
            raise too_large(size, most)
        self._change(tenant_id, size)
        try:
            yield await read_body(request, most)
        finally:
            self._change(tenant_id, -size)

    def _change(self, tenant_id: str, size: int) -> None:
        total, of_tenant = self._total + size, self._of_tenant.get(tenant_id, 0) + size
        is_full = total > _MOST_READ_BYTES and of_tenant > _ALWAYS_READ_OF_TENANT
        if size > 0 and (is_full or of_tenant > _MOST_READ_OF_TENANT):
            raise Refusal(
                RefusalKind.TOO_MANY,
                "Too many requests with large bodies arrive at the same time.",
                do="Send this one again later.",
                retry_after_s=1.0,
            )
        self._total = total
        if of_tenant:
            self._of_tenant[tenant_id] = of_tenant
        else:
            self._of_tenant.pop(tenant_id, None)


def too_large(size: int, most: int) -> Refusal:
    return Refusal(
        RefusalKind.TOO_LARGE,
        "The request's body is too large.",
        got=f"{size} bytes",
        do=f"Send at most {most} bytes.",
        param="body",
    )


async def read_body(request: web.Request, most: int) -> bytes:
    """Return the body. Raises Refusal if it has more than `most` bytes, or is compressed: aiohttp would decompress it,
    and the result could be a thousand times as large."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding != "identity":
        raise Refusal(
            RefusalKind.INVALID,
            "The request's body is compressed.",
            got=encoding[:80],
            do="Send it without Content-Encoding.",
            param=hdrs.CONTENT_ENCODING,
        )
    if (request.content_length or 0) > most:
        raise too_large(request.content_length or 0, most)
    body = bytearray()
    size = most if request.content_length is None else request.content_length
    try:
        async with asyncio.timeout(GRACE_S + size / LEAST_BYTES_PER_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most:
                    raise too_large(len(body), most)
    except TimeoutError as error:
        raise Refusal(
            RefusalKind.INVALID,
            "The request's body arrived too slowly.",
            got=f"{len(body)} of {size} bytes",
            do="Send the request again, over a faster connection.",
            param="body",
        ) from error
    except (ConnectionError, web.RequestPayloadError) as error:
        raise Refusal(
            RefusalKind.INVALID, "The request's body did not arrive whole.", do="Send the request again.", param="body"
        ) from error
    return bytes(body)


async def read_json(request: web.Request, model: type[Body], *, most: int = MOST_JSON_BYTES) -> Body:
    """Return the body as a `model`. Raises Refusal."""
    return parse_json(await read_body(request, most), model)


def parse_json(body: bytes, model: type[Body]) -> Body:
    """Return the JSON text as a `model`. Raises Refusal, which names the first field at fault."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = _name_of(first["loc"])[:_LONGEST_NAME]
        if first["type"] == "extra_forbidden":
            raise Refusal(
                RefusalKind.INVALID,
                f"This hub does not know the option {name}.",
                do="Leave it out, or use a version of the tinker SDK that this hub's documentation names.",
                param=name,
            ) from error
        raise Refusal(
            RefusalKind.INVALID,
            f"The field {name} of the request is not valid: {first['msg']}." if name else f"{first['msg']}.",
            got=reprlib.repr(first["input"])[:80] if name else None,
            param=name,
        ) from error


def _name_of(place: Iterable[int | str]) -> str:
    """Return a field's name, for example `prompt.chunks[2].tokens`."""
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
