"""The models of `GET /v1/models`, by the names that requests may use.

run             the newest version of the run's own training; run@latest is the same
run@12          one version of it
base            the base model without an adapter, and its aliases
tinker://PATH   weights that the tenant has saved for sampling

`run` comes first: clients such as TRL's use the first model. Before the run's first version there is no `run`.
"""

from __future__ import annotations

from typing import Any, Final

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import WeightsKind
from echo_hub.tenants.service import TenantService

RUN: Final = "run"
LATEST: Final = "run@latest"
BASE: Final = "base"
MOST_CHARACTERS: Final = 512


class ModelList:
    def __init__(self, service: TenantService, *, context_tokens: int) -> None:
        self._service = service
        self._context_tokens = context_tokens

    async def every(self, tenant_id: str) -> dict[str, Any]:
        names = [*await self._of_run(tenant_id), *self._of_base(), *await self._saved(tenant_id)]
        return {"object": "list", "data": [self._card(name) for name in dict.fromkeys(names)]}

    async def one(self, tenant_id: str, name: str) -> dict[str, Any]:
        """Return the entry of the model `name`. Raises Refusal if there is no such model."""
        if len(name) > MOST_CHARACTERS:
            raise Refusal(RefusalKind.NOT_FOUND, "There is no such model.", got=f"{name[:100]}...", param="model")
        return self._card(name) | {"root": await self._service.resolve(tenant_id, name)}

    async def _of_run(self, tenant_id: str) -> list[str]:
        try:
            exact = await self._service.resolve(tenant_id, LATEST)
        except Refusal:
            return []
        return [] if exact == BASE else [RUN, LATEST, exact]

    def _of_base(self) -> list[str]:
        return [BASE, *(model.name for model in self._service.offered())]

    async def _saved(self, tenant_id: str) -> list[str]:
        saved = await self._service.checkpoints(tenant_id)
        return [checkpoint.path for checkpoint in saved if checkpoint.kind is WeightsKind.SAMPLER]

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "echo",
            "max_model_len": self._context_tokens,
        }
