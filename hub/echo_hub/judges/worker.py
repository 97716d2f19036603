"""Process of a reward model: `python -m echo_hub.judges.worker`, started by `echo_hub.judges.reward_model`.

A prompt and its completion form one sequence: a conversation if the tokenizer has a chat template, else a pair of
texts. Sequences of similar length form a batch, whose size a token budget limits.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from echo_hub.config.judge_section import RewardModelConfig
from echo_hub.run.base_files import resolve_base
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.process.answering import serve
from echo_shared.process.child import Frame, ParentPipe
from echo_shared.sampling.torch_precision import multiplies

DETAIL_CHARACTERS: Final = 500


class Classifier:
    """The loaded reward model; create it with `open`."""

    def __init__(self, model: Any, tokenizer: Any, settings: RewardModelConfig) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        most = getattr(model.config, "max_position_embeddings", 0) or 0
        self._most_tokens = min(filter(None, (settings.max_tokens, most)), default=2**20)

    @classmethod
    def open(cls, settings: RewardModelConfig) -> Classifier:
        """Load the model. Raises ConfigError if the model does not exist, ScorerError if this machine cannot run it as
        a reward model.
        """
        torch.set_num_threads(settings.threads)
        device = _device(settings.device)
        half = device.type == "cuda" and multiplies(device, torch.bfloat16)
        directory = resolve_base(settings.model)
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                directory,
                dtype=torch.bfloat16 if half else torch.float32,
                local_files_only=True,
                use_safetensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ScorerError(
                "This is not a reward model that transformers loads.", got=f"{settings.model}: {error!r}"[:2000]
            ) from error
        if model.config.num_labels != 1:
            raise ScorerError(
                "A reward model has one logit.",
                got=f"{settings.model} with {model.config.num_labels}",
                do="Name a sequence classifier with num_labels = 1.",
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        return cls(model.to(device).eval(), tokenizer, settings)

    def score(self, asked: Sequence[tuple[str, str]]) -> Iterator[Frame]:
        """Yield one answer for each (prompt, completion), with its index. Short sequences come first."""
        encoded = {}
        for at, (prompt, completion) in enumerate(asked):
            try:
                encoded[at] = self._encoded(prompt, completion)
            except Exception as error:  # noqa: BLE001 - The chat template belongs to the model: report its error.
                yield {"at": at, "failed": repr(error)[:DETAIL_CHARACTERS]}
                continue
            if (length := _length(encoded[at])) > self._most_tokens:
                del encoded[at]
                yield {"at": at, "failed": f"{length} tokens, more than {self._most_tokens}"}
        for places in _batches({at: _length(one) for at, one in encoded.items()}, self._settings.tokens_at_once):
            yield from self._scored(encoded, places)

    def _encoded(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """Encode prompt and completion as plain text. Strings that look like control tokens are not read as control
        tokens, so no completion can add a turn."""
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            found = self._tokenizer.apply_chat_template(turns, sanitize_control_tokens=True, return_dict=True)
        else:
            found = self._tokenizer(prompt, completion, split_special_tokens=True)
        return {name: list(ids) for name, ids in found.items()}

    def _scored(self, encoded: dict[int, dict[str, list[int]]], places: Sequence[int]) -> Iterator[Frame]:
        try:
            logits = self._logits([encoded[at] for at in places])
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if len(places) == 1:
                yield {"at": places[0], "failed": f"not enough memory: {error}"[:DETAIL_CHARACTERS]}
            else:
                for half in (places[: len(places) // 2], places[len(places) // 2 :]):
                    yield from self._scored(encoded, half)
            return
        for at, logit in zip(places, logits, strict=True):
            if math.isfinite(logit):
                yield {"at": at, "value": self._value(logit), "tokens": _length(encoded[at])}
            else:
                yield {"at": at, "failed": f"the logit is {logit}"}

    @torch.inference_mode()
    def _logits(self, batch: Sequence[dict[str, list[int]]]) -> list[float]:
        padded = self._tokenizer.pad(list(batch), padding=True, padding_side="right", return_tensors="pt")
        logits_B1 = self._model(**padded.to(self._model.device)).logits
        found: list[float] = logits_B1.squeeze(-1).double().tolist()
        return found

    def _value(self, logit: float) -> float:
        if self._settings.sigmoid:
            return 0.5 * (1.0 + math.tanh(0.5 * logit))
        return min(max(logit, self._settings.lowest), self._settings.highest)


def _length(encoded: dict[str, list[int]]) -> int:
    return len(encoded["input_ids"])


def _batches(lengths: dict[int, int], tokens_at_once: int) -> Iterator[list[int]]:
    """Yield batches of indices, shortest sequences first. With padding, a batch stays within the token budget, unless
    it has a single sequence."""
    batch: list[int] = []
    for at in sorted(lengths, key=lambda at: lengths[at]):
        if batch and (len(batch) + 1) * lengths[at] > tokens_at_once:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("PyTorch finds no CUDA device.", got=f"device = {name}", do="Set it to auto or cpu.")
    return torch.device(name)


def opened(opening: Frame) -> Callable[[Frame], Iterator[Frame]]:
    """Load the model and return the function that answers requests. Raises the errors of `Classifier.open`."""
    classifier = Classifier.open(RewardModelConfig.model_validate(opening["settings"]))
    return lambda request: classifier.score(request["asked"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(serve(ParentPipe(), opened))
