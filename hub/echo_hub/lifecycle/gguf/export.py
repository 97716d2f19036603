"""Export a version as one GGUF file, with weights, tokenizer and chat template, for llama.cpp and programs that build
on it.

    adapter + base -> merged directory (float32) -> GGUF without tokenizer -> GGUF with tokenizer

The tokenizer is checked twice against the base's own: before the weights, which take minutes, and in the finished file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.exported import NamedBase, adapter_of, write_card, written
from echo_hub.lifecycle.gguf.ollama import modelfile
from echo_hub.lifecycle.gguf.reading import Readings, best_reading, check_reading, shown
from echo_hub.lifecycle.gguf.vocabulary import Field, Vocabulary, vocabulary_in, vocabulary_of
from echo_hub.lifecycle.gguf.writing import write_vocabulary, write_with_tokenizer
from echo_hub.lifecycle.merging import Dtype, merge
from echo_hub.lifecycle.model_card import GgufCard
from echo_hub.run.base_files import resolve_base, vocabulary_size
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.gguf_base import gguf_in
from echo_shared.errors import BackendError, ConfigError
from echo_shared.gguf.model_file import convert_model

PRECISIONS: Final = ("f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
_SPECIAL_NAMES: Final = ("phi-3", "phi3", "modern-bert")
"""Parts of model names for which llama.cpp changes how it reads some tokens, so a file must not carry such a name."""


_MERGED: Final[Mapping[str, Dtype]] = {"bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedGguf:
    version: int
    file: Path
    notes: tuple[str, ...]
    """Sentences about differences from the base's own tokenizer."""
    ollama_name: str = ""


def export_gguf(
    directory: RunDirectory,
    destination: Path,
    *,
    policy_version: int | None,
    precision: str,
    dtype: Dtype = "auto",
    with_ollama: bool = False,
) -> ExportedGguf:
    """Write a version, merged into its base model, as a GGUF file to a new directory `destination`; None means the
    newest version.

    `dtype` is the dtype of the merged weights, before llama.cpp rounds them to `precision`. With "auto" it is
    `precision` if that has 16 bits, because `merge` rounds so that small changes survive; otherwise it is float32.
    Raises ConfigError, also if llama.cpp would read text with other tokens than the base model.
    """
    if precision not in PRECISIONS:
        raise ConfigError("There is no such precision.", got=precision, do=f"Use one of {', '.join(PRECISIONS)}.")
    version, adapter = adapter_of(directory, policy_version)
    config = load_config(directory.config, {})
    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    slug = _slug(config.run.name)
    file = f"{slug}-v{version}-{precision}.gguf"
    with written(destination) as whole:
        work = whole.parent / "work"
        work.mkdir()
        vocabulary, found = _vocabulary(config, base_dir, codec, work)
        merge(base_dir, adapter, work / "merged", dtype=_MERGED.get(precision, "float32") if dtype == "auto" else dtype)
        converted = _converted(work / "merged", work / "converted", precision)
        shutil.rmtree(work / "merged")
        name = f"{config.run.name}, version {version}"
        write_with_tokenizer(converted, whole / file, vocabulary, found.reading, about=_about(config, name))
        _check_file(whole / file, vocabulary, found, codec)
        notes = _notes(found, codec)
        ollama_name = f"{slug}:v{version}" if with_ollama else ""
        card = GgufCard(
            file=file,
            precision=precision,
            is_chat=codec.is_chat,
            temperature=config.sampling.temperature,
            ollama_name=ollama_name,
            notes=notes,
        )
        if with_ollama:
            text = modelfile(
                codec,
                file=file,
                system_prompt=config.task.system_prompt,
                prompt_suffix=config.task.prompt_suffix,
                temperature=config.sampling.temperature,
            )
            (whole / "Modelfile").write_text(text, encoding="utf-8")
        write_card(directory, whole, version, NamedBase.of(config.model.base), kind="gguf", gguf=card)
    return ExportedGguf(version=version, file=destination / file, notes=notes, ollama_name=ollama_name)


def _vocabulary(config: HubConfig, base_dir: Path, codec: PromptCodec, work: Path) -> tuple[Vocabulary, Readings]:
    """Return the vocabulary to write, and the results of the test how llama.cpp reads text with it.

    A base model from a GGUF file keeps the vocabulary of that file. The hub's tokenizer is transformers' conversion of
    this vocabulary, and differences between the two are noted. For any other base, the vocabulary comes from
    tokenizer.json. Raises ConfigError if llama.cpp would read everyday text with other tokens than tokenizer.json says.
    """
    given = gguf_in(Path(config.model.base).expanduser())
    own = None if given is None else vocabulary_in(given, num_tokens=vocabulary_size(base_dir))
    vocabulary = own or vocabulary_of(base_dir, codec)
    write_vocabulary(work / "vocabulary.gguf", vocabulary)
    found = best_reading(work / "vocabulary.gguf", vocabulary, codec)
    if own is None:
        check_reading(found)
    return vocabulary, found


def _converted(merged: Path, into: Path, precision: str) -> Path:
    try:
        return convert_model(merged, into, precision)
    except BackendError as error:
        raise ConfigError(
            "This model cannot be written as a GGUF file.",
            got=str(error),
            do="Export it as a directory for transformers: --merged instead of --gguf.",
        ) from error


def _check_file(file: Path, vocabulary: Vocabulary, found: Readings, codec: PromptCodec) -> None:
    """Raise ConfigError unless llama.cpp encodes text with the finished file in the same way as with the vocabulary
    alone."""
    whole = Vocabulary(fields=vocabulary.fields, readings=({},))
    again = best_reading(file, whole, codec)
    if (again.everyday, again.rare) != (found.everyday, found.rare):
        raise ConfigError(
            "llama.cpp reads text in another way with the finished file than with its tokenizer alone.",
            got=f"{len(again.everyday) + len(again.rare)} texts differ, for example "
            f"{shown((*again.everyday, *again.rare, '')[0])}",
            do="Rename the run, or export a directory: --merged instead of --gguf.",
        )


def _notes(found: Readings, codec: PromptCodec) -> tuple[str, ...]:
    notes = []
    if found.everyday:
        notes.append(
            f"llama.cpp reads {len(found.everyday)} of the ordinary texts that were tried with other tokens than the "
            f"hub did in training, for example {shown(found.everyday[0])}. It reads them as the GGUF file says from "
            "which the base model came."
        )
    if found.rare:
        examples = ", ".join(map(shown, found.rare[:3]))
        notes.append(
            f"llama.cpp reads {len(found.rare)} of the rare texts that were tried with other tokens than the model was "
            f"trained with, for example {examples}."
        )
    if found.unended:
        texts = ", ".join(codec.text([token_id]) or str(token_id) for token_id in found.unended)
        notes.append(f"llama.cpp does not end a reply at these tokens by itself: {texts}. Name them as stop texts.")
    return tuple(notes)


def _about(config: HubConfig, name: str) -> list[Field]:
    is_special = any(part in name.lower() for part in _SPECIAL_NAMES)
    told = {gguf.Keys.General.DESCRIPTION: f"Trained with Echo on the task {config.task.label}"}
    if not is_special:
        told[gguf.Keys.General.NAME] = name
    return [Field(key=key, value=value, type=gguf.GGUFValueType.STRING) for key, value in told.items()]


def _slug(name: str) -> str:
    """Return the run's name in a form for file names and for names in Ollama."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "model"
