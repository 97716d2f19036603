"""The work of the process of tenants' models: passes, steps, files, samples and log-probabilities of prompts.

The worker divides all work into small units: a micro-batch, a sampling step of one batch, a forward pass over prompts,
or another command. Between two units, the process reads new commands. `FairTurns` chooses the next unit:

- Training, drawing and prompts are three kinds of work. Kinds that have work share the time equally.
- Models that train share the time of training equally. The worker executes a model's commands in sending order.
- Adapters that draw share the time of drawing equally: `echo_hub.learner.models.sampling`.

Models do not influence each other: each model has its own tensors, and a micro-batch holds data of one request. On
a CPU, equal requests give equal adapters, bit by bit, whatever other models do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import torch

from echo_hub.learner import determinism
from echo_hub.learner.models import files, frames
from echo_hub.learner.models.adapters import ALPHA, AdapterSeat
from echo_hub.learner.models.inputs import check_ids, check_pass, check_prompt
from echo_hub.learner.models.probing import AdapterProbe
from echo_hub.learner.models.prompts import PromptJob, prompt_logprobs
from echo_hub.learner.models.sampling import GREEDY_TEMPERATURE, Job, JobFailure, JobSampler, TokenPiece
from echo_hub.learner.models.training import Pass, PassSizes, TrainedModel
from echo_hub.learner.models.turns import FairTurns
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import CudaMeter, first_cut
from echo_hub.learner.settings import LearnerSettings
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, LoraWish
from echo_shared.errors import EchoError, LearnerError
from echo_shared.process.child import Frame
from echo_shared.process.out_of_memory import ran_out
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_cache import spare_bytes

log = logging.getLogger(__name__)

Unit = Iterator[Frame | None]
"""Work on one command. Each item marks the end of one unit of work; the last item is the answer."""

CPU_TOKENS: Final = 1_024
"""Largest micro-batch on a CPU, in tokens. Larger micro-batches are no faster there, and other models would wait
longer.
"""
MEASURED_RANK: Final = 32
TRAIN: Final = "train"
DRAW: Final = "draw"
PROMPTS: Final = "prompts"


class FrameSink(Protocol):
    """Sends the worker's answers to the hub, through a pipe."""

    def send(self, frame: Frame) -> None: ...


class ModelWorker:
    """Queues the commands that the hub sends (`take`), works on them (`work`), and sends the answers to `sink`."""

    def __init__(
        self, policy: Policy, settings: LearnerSettings, sink: FrameSink, *, kv_bytes: int, tokens: int
    ) -> None:
        self._policy = policy
        self._sink = sink
        self._seat = AdapterSeat(policy)
        self._probe = AdapterProbe(policy, self._seat)
        self._base = files.base_fingerprint(settings.base_dir)
        self._sizes = PassSizes(tokens=tokens, may_checkpoint=bool(settings.learner.gradient_checkpointing))
        self._prompt_tokens = tokens
        self._sampler = JobSampler(policy, self._seat, base_dir=settings.base_dir, kv_bytes=kv_bytes)
        self._models: dict[str, TrainedModel] = {}
        self._queues: dict[str, deque[Frame]] = {}
        """Each model's waiting commands, oldest first. Work on the first one may have begun."""
        self._under_way: dict[str, Unit] = {}
        self._prompts: deque[tuple[Path | None, PromptJob]] = deque()
        self._kinds: FairTurns[str] = FairTurns()
        self._turns: FairTurns[str] = FairTurns()
        config = policy.model.config.get_text_config(decoder=True)
        self.context_tokens = int(getattr(config, "max_position_embeddings", None) or 2**31)

    @classmethod
    def open(cls, given: LearnerSettings, sink: FrameSink) -> ModelWorker:
        """Load the base model. Raises LearnerError."""
        settings = of_models(given)
        if settings.learner.threads:
            torch.set_num_threads(settings.learner.threads)
        determinism.choose(deterministic=settings.learner.deterministic)
        policy = Policy.load(settings)
        # Keys and values of samples stay in memory while models train, so both get their own share of it.
        kv_bytes = settings.learner.kv_cache_bytes or spare_bytes(policy.device)
        if policy.device.type == "cuda":
            cut = first_cut(policy, settings, _SharedMeter(policy.device, kv_bytes))
            policy.checkpoints, tokens = cut.gradient_checkpointing, cut.micro_batch_tokens
        else:
            tokens = settings.learner.micro_batch_tokens or CPU_TOKENS
        return cls(policy, settings, sink, kv_bytes=kv_bytes, tokens=tokens)

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def has_work(self) -> bool:
        return bool(self._queues or self._prompts or self._sampler.has_work)

    def take(self, frame: Frame) -> None:
        """Queue a command. A request that can never succeed is refused at once."""
        try:
            match frame["command"]:
                case "draw":
                    self._take_job(frame)
                case "cancel":
                    self._sampler.cancel(frame["of"])
                    self._prompts = deque(item for item in self._prompts if item[1].number != frame["of"])
                case "prompt_logprobs":
                    self._take_prompt(frame)
                case _:
                    self._queues.setdefault(frame["model_id"], deque()).append(frame)
        except EchoError as error:
            self._sink.send({"call": frame["call"], **frames.pack_error(error)})

    def work(self) -> None:
        """Do one unit of work, such as one micro-batch. Call this only if there is work."""
        ready = []
        if self._queues:
            ready.append(TRAIN)
        if self._sampler.has_work:
            ready.append(DRAW)
        if self._prompts:
            ready.append(PROMPTS)
        kind = self._kinds.next(ready)
        with _timed(self._kinds, kind):
            if kind == TRAIN:
                self._train()
            elif kind == DRAW:
                self._tell(self._sampler.step())
            else:
                self._answer_prompts()

    def _train(self) -> None:
        model_id = self._turns.next(list(self._queues))
        frame = self._queues[model_id][0]
        answer: Frame | None = None
        with _timed(self._turns, model_id):
            if model_id not in self._under_way:
                self._under_way[model_id] = self._unit(frame)
            try:
                answer = next(self._under_way[model_id])
            except EchoError as error:
                answer = frames.pack_error(error)
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                answer = frames.pack_error(_too_little("this model", error))
        if answer is None:
            return
        del self._under_way[model_id]
        self._queues[model_id].popleft()
        if not self._queues[model_id]:
            del self._queues[model_id]
            if model_id not in self._models:
                self._turns.forget(model_id)
        self._sink.send({"call": frame["call"], **answer})

    def _unit(self, frame: Frame) -> Unit:
        model_id = frame["model_id"]
        result: Frame = {}
        match frame["command"]:
            case "create":
                wish = LoraWish(**frame["wish"])
                if wish.seed is None:
                    wish = LoraWish(**{**frame["wish"], "seed": derive_seed("model", model_id)})
                self._models[model_id] = TrainedModel.of(wish, self._seat.fresh(wish))
            case "forget":
                self._models.pop(model_id, None)
            case "drop_gradient":
                self._model(model_id).drop_gradient()
            case "forward_backward":
                request, model = frames.unpack_pass(frame), self._model(model_id)
                check_pass(request, vocab_size=self._policy.vocab_size, context_tokens=self.context_tokens)
                for item in Pass(self._policy, self._seat, model, request, self._sizes).run():
                    if item is None:
                        yield None
                    else:
                        result = frames.pack_result(item)
            case "optim_step":
                result = {"metrics": self._model(model_id).step(AdamStep(**frame["step"]))}
            case "save":
                files.save(self._model(model_id), self._seat, Path(frame["directory"]), base=self._base)
            case "export":
                files.export(self._model(model_id), self._seat, Path(frame["directory"]), probe=self._probe)
            case "load":
                self._load(model_id, Path(frame["directory"]), optimizer=frame["optimizer"])
            case unknown:
                raise LearnerError("The process of models does not know this command.", got=str(unknown))
        yield {"kind": "result", **result}

    def _load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        loaded = files.load_model(directory, self._seat, base=self._base, optimizer=optimizer)
        before = self._models.get(model_id)
        if before is not None and _kind(before.wish) != _kind(loaded.wish):
            raise Refusal(
                RefusalKind.INVALID,
                "These weights do not fit the model.",
                got=f"rank {loaded.wish.rank}, the model has rank {before.wish.rank}",
                do="Load them into a new model.",
                param="path",
            )
        self._models[model_id] = loaded

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self._models:
            raise LearnerError("The process does not hold this model.", got=model_id, do="Create or load it first.")
        return self._models[model_id]

    def _take_job(self, frame: Frame) -> None:
        prompt, first = frame["prompt_ids"], frame["first_index"]
        check_prompt(prompt, vocab_size=self._policy.vocab_size, context_tokens=self.context_tokens)
        space = self.context_tokens - len(prompt)
        if not 1 <= frame["max_tokens"] <= space:
            raise Refusal(
                RefusalKind.INVALID,
                "max_tokens is out of range.",
                got=f"{frame['max_tokens']}, the context has space for {space} tokens after the prompt",
                do="Ask for fewer tokens, or send a shorter prompt.",
                param="max_tokens",
            )
        request = GroupRequest(
            lease_id=frame["call"],
            group_id=frame["call"],
            indices=tuple(range(first, first + frame["num_samples"])),
            prompt_ids=prompt,
            seed=frame["seed"],
            policy_version=0,
            temperature=max(frame["temperature"], GREEDY_TEMPERATURE),
            max_tokens=frame["max_tokens"],
            stop_ids=tuple(frame["stop_ids"]),
        )
        job = Job(number=frame["call"], request=request, strings=tuple(frame["stop_strings"]))
        self._sampler.add(job, _path(frame["adapter"]))

    def _take_prompt(self, frame: Frame) -> None:
        prompt, targets, vocab_size = frame["prompt_ids"], frame["target_ids"], self._policy.vocab_size
        check_prompt(prompt, vocab_size=vocab_size, context_tokens=self.context_tokens)
        if targets is not None:
            check_ids(targets, "target_ids", vocab_size=vocab_size)
            if targets.ndim != 2 or len(targets) != len(prompt):
                raise Refusal(
                    RefusalKind.INVALID,
                    "target_ids does not have one row for each token of the prompt.",
                    got=f"shape {targets.shape} for {len(prompt)} tokens",
                    param="target_ids",
                )
        if not 0 <= frame["top_k"] <= vocab_size:
            raise Refusal(
                RefusalKind.INVALID, "top_k is out of range.", got=str(frame["top_k"]), param="topk_prompt_logprobs"
            )
        job = PromptJob(number=frame["call"], prompt_ids=prompt, top_k=frame["top_k"], target_ids=targets)
        self._prompts.append((_path(frame["adapter"]), job))

    def _answer_prompts(self) -> None:
        """Answer the first prompt. Include later prompts with the same adapter, as far as they fit into one pass."""
        adapter, total, taken, kept = self._prompts[0][0], 0, list[PromptJob](), deque[tuple[Path | None, PromptJob]]()
        for path, job in self._prompts:
            if path == adapter and (not taken or total + len(job.prompt_ids) <= self._prompt_tokens):
                taken.append(job)
                total += len(job.prompt_ids)
            else:
                kept.append((path, job))
        self._prompts = kept
        failure: EchoError
        try:
            self._seat.hold(self._sampler.tensors(adapter))
            found = prompt_logprobs(self._policy, taken)
        except EchoError as error:
            failure, found = error, []
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if len(taken) > 1:
                self._prompt_tokens = total // 2
                self._prompts.extendleft((adapter, job) for job in reversed(taken))
                return
            failure, found = _too_little("a prompt of this length", error), []
        if not found:
            for job in taken:
                self._sink.send({"call": job.number, **frames.pack_error(failure)})
            return
        for job, result in zip(taken, found, strict=True):
            self._sink.send({"call": job.number, "kind": "result", **frames.pack_logprobs(result)})

    def _tell(self, found: list[TokenPiece | JobFailure]) -> None:
        pieces = [piece for piece in found if isinstance(piece, TokenPiece) and not piece.finish]
        if pieces:
            self._sink.send({"call": 0, "kind": "pieces", "pieces": [_packed(piece) for piece in pieces]})
        for item in found:
            if isinstance(item, JobFailure):
                self._sink.send({"call": item.number, **frames.pack_error(item.error)})
            elif item.finish:
                self._sink.send({"call": item.number, "kind": "sample", **_packed(item), "finish": item.finish})
                if item.ends_job:
                    self._sink.send({"call": item.number, "kind": "result"})


class _SharedMeter(CudaMeter):
    """Measures a GPU's free memory without the part that is kept for samples."""

    def __init__(self, device: torch.device, kept_bytes: int) -> None:
        super().__init__(device)
        self._kept_bytes = kept_bytes

    def free_bytes(self) -> int:
        return max(0, super().free_bytes() - self._kept_bytes)


def of_models(settings: LearnerSettings) -> LearnerSettings:
    """Return the settings with which this process loads the run's base: one process, temperature 1, and layers for
    adapters of attention and feed-forward blocks.
    """
    learner = settings.learner.model_copy(update={"processes": 1, "hosts": 1, "address": ""})
    adapter = {"lora_rank": MEASURED_RANK, "lora_alpha": ALPHA, "rslora": False, "lora_targets": "all"}
    training = settings.training.model_copy(update=adapter)
    return settings.model_copy(update={"learner": learner, "training": training, "temperature": 1.0})


@contextmanager
def _timed(turns: FairTurns[str], key: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    turns.spent(key, time.perf_counter() - started)


def _too_little(what: str, error: Exception) -> LearnerError:
    said = str(error) or type(error).__name__
    return LearnerError(f"The hub's device has too little memory for {what}.", got=said, do="Try again later.")


def _kind(wish: LoraWish) -> tuple[int, bool, bool]:
    return wish.rank, wish.attention, wish.mlp


def _packed(piece: TokenPiece) -> Frame:
    return {
        "of": piece.number,
        "index": piece.index,
        "start": piece.start,
        "ids": piece.ids,
        "logprobs": piece.logprobs,
    }


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given)
