"""Accept sample requests: check them, fix their version and seed, commit them, and start to draw them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.store.tenant_reading import find_request
from echo_hub.store.tenant_records import RequestRow, SamplerRow
from echo_hub.tenants.core import BASE, Offer, TenantCore
from echo_hub.tenants.drawing import DrawnPiece
from echo_hub.tenants.futures import CLONE
from echo_hub.tenants.model_requests import MOST_NUMBER, MOST_SEQ, ModelRequests, check_number
from echo_hub.tenants.outcomes import Accepted
from echo_hub.tenants.paths import SCHEME
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Sample, SampleResult, SamplingWish, WeightsKind
from echo_hub.tenants.sampling import TenantSampling, job_of
from echo_hub.tenants.sampling_limits import complete
from echo_hub.tenants.sessions import (
    LiveSampler,
    LiveSession,
    new_request_id,
    sampler_id_of,
    session_id_of,
)
from echo_hub.tenants.shared_seeds import SharedSeeds, equality_key
from echo_hub.tenants.stored import SampleWork, pack_stored
from echo_hub.tenants.weights import Weights
from echo_shared.sampling.draws import derive_seed

SAMPLE: Final = "sample"
RUN: Final = "run"
MOST_SAMPLERS: Final = 4_096
"""Maximum number of samplers in one session."""
_SEEDS: Final = 2**64


class RunVersions(Protocol):
    """Access to the versions of the run's own training."""

    name: str
    """Name of the run."""

    def newest(self) -> int:
        """Return the newest published version; 0 = the base model."""
        ...

    def has(self, policy_version: int) -> bool:
        """Return True if nodes can sample with this version."""
        ...


class SampleRequests:
    """The samplers and sample requests of all tenants."""

    def __init__(
        self,
        core: TenantCore,
        offer: Offer,
        *,
        models: ModelRequests,
        sampling: TenantSampling,
        weights: Weights,
        run_versions: RunVersions,
    ) -> None:
        self._sessions = core.sessions
        self._store = core.store
        self._writer = core.writer
        self._futures = core.futures
        self._adapters = core.adapters
        self._quotas = core.quotas
        self._identities = core.identities
        self._facts = offer.facts
        self._base_names = offer.base_names
        self._secret = offer.secret
        self._models = models
        self._sampling = sampling
        self._weights = weights
        self._run_versions = run_versions
        self._seeds = SharedSeeds()

    async def create_sampler(
        self, tenant_id: str, session_id: str, *, sampler_seq_id: int, base_model: str, path: str
    ) -> str:
        session = await self._models.session(tenant_id, session_id)
        check_number("sampling_session_seq_id", sampler_seq_id, least=0, most=MOST_NUMBER)
        return await self._identities.finished(self._create_sampler(session, sampler_seq_id, base_model, path))

    async def _create_sampler(self, session: LiveSession, sampler_seq_id: int, base_model: str, path: str) -> str:
        sampler_id = sampler_id_of(session.session_id, sampler_seq_id)
        async with self._identities.only(sampler_id, -1):
            base_model = base_model or (BASE if path else "")
            there = session.samplers.get(sampler_id)
            asked = (path, base_model, bool(path))
            if there and asked == (there.row.path, there.row.base_model, bool(there.row.policy_version)):
                return sampler_id
            await self._weights.check_new_sampler(sampler_id)
            if len(session.samplers) >= MOST_SAMPLERS:
                raise Refusal(
                    RefusalKind.FORBIDDEN,
                    "The session has too many samplers.",
                    got=f"{len(session.samplers):,} of {MOST_SAMPLERS:,}",
                    do="Use the samplers that you have, or open another session.",
                )
            version, model_id = 0, ""
            if path:
                row = await self._weights.find(session.tenant_id, path)
                _check_for_sampling(row.kind, path)
                version, model_id = row.policy_version, row.model_id
            self._models.check_base(base_model)
            self._adapters.hold(version, sampler_id)  # Before the commit: meanwhile the weights may be deleted.
            sampler = SamplerRow(
                sampler_id=sampler_id,
                tenant_id=session.tenant_id,
                session_id=session.session_id,
                base_model=base_model,
                path=path,
                model_id=model_id,
                policy_version=version,
                inflight=False,
                made_at=time.time(),
            )
            await self._writer.commit(sampler)
            if self._sessions.session(session.tenant_id, session.session_id) is None:  # It has ended meanwhile.
                self._adapters.release(version, sampler_id)
                raise await self._models.absent(session.tenant_id, sampler_id, "sampler")
            session.samplers[sampler_id] = LiveSampler(row=sampler, last_used=time.monotonic(), newest_seq={})
            return sampler_id

    async def sampler(self, tenant_id: str, sampler_id: str) -> LiveSampler:
        found = self._sessions.sampler(tenant_id, sampler_id)
        if found is None:
            raise await self._models.absent(tenant_id, sampler_id, "sampler")
        await self._models.session(tenant_id, found.row.session_id)
        return found

    async def sample(
        self, tenant_id: str, sampler_id: str, *, seq_id: int, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> Accepted:
        sampler = await self.sampler(tenant_id, sampler_id)
        check_number("seq_id", seq_id, least=0, most=MOST_SEQ)
        return await self._identities.finished(self._sample(sampler, seq_id, prompt_ids, wish))

    async def _sample(
        self, sampler: LiveSampler, seq_id: int, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> Accepted:
        row = sampler.row
        async with self._identities.only(row.sampler_id, seq_id):
            known = None if _is_new(sampler, seq_id) else await self._store.read(find_request, row.sampler_id, seq_id)
            if known is not None:
                return Accepted(
                    request_id=known.request_id, sequence_ids=sequence_ids(known.request_id, wish.num_samples)
                )
            if self._sessions.session(row.tenant_id, row.session_id) is None:
                # The session has ended meanwhile. A row that is written after its end would wait for ever.
                raise await self._models.absent(row.tenant_id, row.sampler_id, "sampler")
            request_id = new_request_id()
            now = time.time()
            with self._quotas.accepting(row.tenant_id, request_id, len(prompt_ids), now=now):
                work = self._work(request_id, row.tenant_id, self._version(row), prompt_ids, wish)
                request = RequestRow(
                    request_id=request_id,
                    tenant_id=row.tenant_id,
                    session_id=row.session_id,
                    owner_id=row.sampler_id,
                    seq_id=seq_id,
                    kind=SAMPLE,
                    made_at=now,
                    body=pack_stored(work),
                )
                self._adapters.hold(work.policy_version, request_id)
                await self._writer.commit(request)
            if sampler.newest_seq is not None:
                clone = seq_id // CLONE
                sampler.newest_seq[clone] = max(seq_id, sampler.newest_seq.get(clone, -1))
            sampler.last_used = time.monotonic()
            self._futures.add(request_id, tenant_id=row.tenant_id, owner_id=row.sampler_id, tokens=len(work.prompt_ids))
            if self._sessions.session(row.tenant_id, row.session_id) is None:
                self._adapters.release(work.policy_version, request_id)
                self._futures.wake(request_id)  # The session has ended meanwhile.
            else:
                self.begin(request_id, row.tenant_id, work)
            return Accepted(request_id=request_id, sequence_ids=work.sequence_ids)

    def begin(self, request_id: str, tenant_id: str, work: SampleWork) -> None:
        """Start to draw a request that the database holds."""
        assert work.wish.max_tokens is not None
        cost = self._sampling.expected_tokens(
            tenant_id, len(work.prompt_ids), work.wish.num_samples, work.wish.max_tokens
        )
        self._sampling.arrive(request_id, tenant_id, work, cost)

    async def sample_at_once(
        self, tenant_id: str, *, model: str, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> AsyncIterator[DrawnPiece | Sample | SampleResult]:
        _, version = await self._resolved(tenant_id, model)
        self._quotas.check(tenant_id, now=time.time())
        request_id = new_request_id()
        work = self._work(request_id, tenant_id, version, prompt_ids, wish)
        self._quotas.begin(tenant_id, request_id, len(prompt_ids))
        try:
            async with aclosing(self._sampling.draw_at_once(job_of(request_id, tenant_id, work), work)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._quotas.end(request_id, 0, now=time.time())  # If tokens were drawn, they are already counted.

    async def resolve(self, tenant_id: str, model: str) -> str:
        return (await self._resolved(tenant_id, model))[0]

    async def _resolved(self, tenant_id: str, model: str) -> tuple[str, int]:
        """Return the exact name of the weights that `model` means now, and their version."""
        if model.startswith(SCHEME):
            row = await self._weights.find(tenant_id, model)
            _check_for_sampling(row.kind, model)
            return model, row.policy_version
        if model == BASE or model in self._base_names:
            return BASE, 0
        name, _, version = model.rpartition("@") if "@" in model else (model, "", "latest")
        if name in (RUN, self._run_versions.name):
            if version == "latest":
                newest = self._run_versions.newest()
                return (f"{RUN}@{newest}", newest) if newest else (BASE, 0)
            if version.isascii() and version.isdigit() and len(version) < 10:
                if int(version) == 0:
                    return BASE, 0
                if self._run_versions.has(int(version)):
                    return f"{RUN}@{int(version)}", int(version)
        raise Refusal(
            RefusalKind.NOT_FOUND,
            "There is no such model.",
            got=model[:200],
            do=f"Use {BASE}, {RUN}, {RUN}@VERSION or a path of weights that you have saved for sampling.",
            param="model",
        )

    def _version(self, row: SamplerRow) -> int:
        """Return the version with which the sampler's next request is drawn."""
        if not row.inflight:
            return row.policy_version
        session = self._sessions.session(row.tenant_id, session_id_of(row.sampler_id))
        assert session is not None
        others = (other.row for other in session.samplers.values())
        return max(other.policy_version for other in others if other.inflight and other.model_id == row.model_id)

    def _work(
        self, request_id: str, tenant_id: str, version: int, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> SampleWork:
        wish = complete(prompt_ids, wish, self._facts)
        if wish.seed is None:
            key = equality_key(tenant_id, version, prompt_ids, wish)
            seed, first = self._seeds.take(key, wish.num_samples, derive_seed(self._secret, request_id))
        else:
            seed, first = wish.seed % _SEEDS, 0
        return SampleWork(
            prompt_ids=prompt_ids,
            wish=wish,
            sequence_ids=sequence_ids(request_id, wish.num_samples),
            policy_version=version,
            seed=seed,
            first_index=first,
        )


def _is_new(sampler: LiveSampler, seq_id: int) -> bool:
    """Return True if the seq_id is certainly new for this sampler, so that the database need not be asked."""
    return sampler.newest_seq is not None and seq_id > sampler.newest_seq.get(seq_id // CLONE, -1)


def sequence_ids(request_id: str, num_samples: int) -> tuple[str, ...]:
    return tuple(f"{request_id}-{index}" for index in range(num_samples))


def _check_for_sampling(kind: str, path: str) -> None:
    if kind != WeightsKind.SAMPLER:
        raise Refusal(
            RefusalKind.INVALID,
            "These weights were not saved for sampling.",
            got=path,
            do="Save them with save_weights_for_sampler, and use the path that it returns.",
            param="path",
        )
