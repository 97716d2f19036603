"""Paths of saved weights: `tinker://MODEL/KIND/NAME`, for example `tinker://s-1f:train:0/weights/000100`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import WeightsKind

SCHEME: Final = "tinker://"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPath:
    model_id: str
    kind: WeightsKind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def make(cls, model_id: str, kind: WeightsKind, name: str) -> WeightsPath:
        """Return the path under which a client saves. Raises Refusal for a name that cannot stand in a path."""
        if not _NAME.fullmatch(name):
            raise Refusal(
                RefusalKind.INVALID,
                "This name of weights cannot be used.",
                got=repr(name[:200]),
                do="Use 1 to 128 letters, digits, dots, dashes and underscores.",
                param="path",
            )
        return cls(model_id=model_id, kind=kind, name=name)

    @classmethod
    def parse(cls, text: str) -> WeightsPath:
        """Raises Refusal if this is not a path of weights."""
        parts = text.removeprefix(SCHEME).split("/")
        if text.startswith(SCHEME) and len(parts) == 3 and parts[1] in set(WeightsKind) and _NAME.fullmatch(parts[2]):
            return cls(model_id=parts[0], kind=WeightsKind(parts[1]), name=parts[2])
        raise Refusal(
            RefusalKind.INVALID,
            "This is not a path of saved weights.",
            got=repr(text[:200]),
            do=f"Give a path of the form {SCHEME}MODEL/KIND/NAME, as the hub returned it; KIND is one of "
            f"{', '.join(WeightsKind)}.",
            param="path",
        )
