"""Options that `/v1/chat/completions`, `/v1/completions` and `/inference/v1/generate` have in common."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_hub.openai.error_answers import UnsupportedOption
from echo_hub.openai.unsupported import refuse_unsupported
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import SamplingWish

MOST_SAMPLES: Final = 128
"""Largest value of `n`, the number of completions of one prompt."""
MOST_STOPS: Final = 16
MOST_STOP_IDS: Final = 32
_SEEDS: Final = 2**64
_SHOWN: Final = reprlib.Repr()
"""Shows only the beginning of large values: their full text could take seconds."""
_SHOWN.maxstring = _SHOWN.maxother = 200

StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(max_length=MOST_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class OpenAiFields(BaseModel):
    """Base of all objects in requests. Unknown keys are ignored, and types are strict."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(OpenAiFields):
    include_usage: bool = False


class SamplingOptions(OpenAiFields):
    """Options of all three endpoints."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS)] | None = None
    stop: StopText | StopTexts = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    checked: bool = False
    """True = give only completions whose draws the hub has checked."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Check a body. Keys with the value null count as absent. Raises Refusal with the name of the wrong option."""
        refuse_unsupported(body)
        given = {name: value for name, value in body.items() if value is not None}
        try:
            options = cls.model_validate(given)
        except ValidationError as error:
            raise _wrong(error) from error
        if options.ignore_eos and options.stop_token_ids:
            raise UnsupportedOption(
                "ignore_eos", got="together with stop_token_ids", do="Leave out one of them: end tokens end too."
            )
        return options

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def wish(self, *, room: int) -> SamplingWish:
        """Return the request for the tenants' service. `room` is the number of tokens that the context has left."""
        stop_ids: frozenset[int] | None = frozenset(self.stop_token_ids) or None
        return SamplingWish(
            num_samples=self.n,
            max_tokens=min(self.most_tokens or room, room),
            temperature=self.temperature,
            # OpenAI's seeds are signed, and the hub's are not.
            seed=None if self.seed is None else self.seed % _SEEDS,
            stop_ids=frozenset() if self.ignore_eos else stop_ids,
            stop_strings=self.stop_strings,
            checked=self.checked,
        )

    @property
    def most_tokens(self) -> int | None:
        """Largest number of tokens of a completion; None = up to the end of the model's context."""
        return self.max_tokens


def _wrong(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_context=False)[0]
    # Pydantic's path also has the types of a union, for example "str" and "list[constrained-str]".
    path = [str(part) for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    name = ".".join(path[:6])
    shown = _SHOWN.repr(first["input"])
    if first["type"] == "missing":
        return Refusal(RefusalKind.INVALID, f"The request lacks {name!r}.", do=f"Send {name}.", param=path[0])
    return Refusal(
        RefusalKind.INVALID,
        f"The option {name!r} is not valid: {first['msg']}.",
        got=shown if len(shown) <= 200 else f"{shown[:200]}...",
        param=path[0],
    )
