"""`echo-hub export` and `echo-hub push`: write a trained version for other programs, and upload it to the model hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_hub.lifecycle.beside_hub import RunArgument
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.lifecycle.merging import Dtype

RepoArgument = Annotated[str, typer.Argument(metavar="REPO", help="Id on the model hub: owner/name.")]
PublicOption = Annotated[bool, typer.Option("--public", help="Everybody may read the repository; default: private.")]


def export(
    run_directory: RunArgument,
    destination: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    version: Annotated[int | None, typer.Option(min=1, help="Policy version; default: the newest published.")] = None,
    base: Annotated[
        str | None, typer.Option(metavar="DIR|ID", help="What the adapter calls its base; default: model.base.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model with the adapter merged in, for programs without PEFT.")
    ] = False,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            help="The whole model as one GGUF file with its tokenizer: q8_0, q6_k, q5_k_m, q4_k_m, f16, bf16 or f32.",
        ),
    ] = None,
    ollama: Annotated[bool, typer.Option("--ollama", help="With --gguf: a Modelfile for Ollama as well.")] = False,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16|float16",
            help="Of a merged model; auto: the base's. With --gguf: of the sum of base and adapter; auto: "
            "that of bf16 and f16, else float32.",
        ),
    ] = "auto",
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Then upload the directory to the model hub: owner/name.")
    ] = None,
    public: PublicOption = False,
) -> None:
    """Write a policy version as it was published. There are three forms: an adapter for PEFT's
    `AutoPeftModelForCausalLM.from_pretrained`, a merged model for transformers, or a GGUF file for llama.cpp, LM Studio
    and Ollama. Works while the run's hub serves."""
    from echo_hub.lifecycle.export import export_adapter, export_merged

    directory = RunDirectory(run_directory)
    directory.check()
    chosen = _dtype(dtype, merged=merged, base=base, gguf=gguf, ollama=ollama, push=push, public=public)
    if gguf is not None:
        _export_gguf(directory, destination, version=version, precision=gguf, dtype=chosen, with_ollama=ollama)
    elif merged:
        exported = export_merged(directory, destination, policy_version=version, dtype=chosen)
        typer.echo(f"Policy version {exported} is in {destination}; README.md there says how to use it")
    else:
        exported = export_adapter(directory, destination, policy_version=version, base=base)
        typer.echo(f"Policy version {exported} is in {destination}; README.md there says how to use it")
    if push is not None:
        _push(destination, push, public=public)


def _export_gguf(
    directory: RunDirectory,
    destination: Path,
    *,
    version: int | None,
    precision: str,
    dtype: Dtype,
    with_ollama: bool,
) -> None:
    from echo_hub.lifecycle.gguf.export import export_gguf

    done = export_gguf(
        directory, destination, policy_version=version, precision=precision, dtype=dtype, with_ollama=with_ollama
    )
    for note in done.notes:
        typer.echo(f"Note: {note}", err=True)
    typer.echo(f"Policy version {done.version} is in {done.file}")
    if done.ollama_name:
        typer.echo(
            f"For Ollama: cd {destination} && ollama create {done.ollama_name} -f Modelfile && "
            f"ollama run {done.ollama_name}"
        )


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `echo-hub export` has written.")],
    repo: RepoArgument,
    public: PublicOption = False,
) -> None:
    """Upload an exported directory to the model hub. Repeat the command to continue an interrupted upload.

    The command uses the token of `hf auth login`, or HF_TOKEN.
    """
    _push(folder, repo, public=public)


def _push(folder: Path, repo: str, *, public: bool) -> None:
    from echo_hub.lifecycle.pushing import push as push_folder

    typer.echo(f"Uploaded to {push_folder(folder, repo, public=public)}")


def _dtype(
    dtype: str, *, merged: bool, base: str | None, gguf: str | None, ollama: bool, push: str | None, public: bool
) -> Dtype:
    """Return the dtype. Raises ConfigError if options do not belong together."""
    from echo_hub.lifecycle.merging import DTYPES

    chosen = next((one for one in DTYPES if one == dtype), None)
    whole = merged or gguf is not None
    wrong = ""
    if chosen is None or (chosen != "auto" and not whole):
        wrong = f"--dtype is one of {', '.join(DTYPES)}, and needs --merged or --gguf."
    elif whole and base is not None:
        wrong = "--base is for an adapter, without --merged and --gguf."
    elif merged and gguf is not None:
        wrong = "Choose one of --merged and --gguf; a GGUF file is always merged."
    elif ollama and gguf is None:
        wrong = "--ollama needs --gguf, for example --gguf q8_0."
    elif public and push is None:
        wrong = "--public needs --push."
    if wrong or chosen is None:
        given = {"merged": merged, "base": base, "gguf": gguf, "ollama": ollama, "push": push, "public": public}
        said = [f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items() if value]
        raise ConfigError("These options do not belong together.", got=" ".join([f"--dtype {dtype}", *said]), do=wrong)
    return chosen
