"""Settings of scorers, and of the Ray cluster for scorers, verifiers and evaluators."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from echo_hub.config.section import Section

Amount = Annotated[float, Field(ge=0, le=1e6)]
WorkerKind = Literal["scorer", "verifier", "evaluator"]
"""Kinds of processes that may run in the Ray cluster."""


class ScoringConfig(Section):
    """The machines and processes in which scorers run."""

    engine: Literal["local", "ray"] = "local"
    """local: processes on the hub's machine. ray: the same processes under Ray actors in the cluster of [ray]; this
    needs the extra `ray`. Both run task.scorer_processes processes with the limits of [task]."""


class RayConfig(Section):
    """The Ray cluster, for scoring.engine, trust.verifier and evaluation.by with the value "ray"."""

    address: Annotated[str, Field(pattern=r"^(auto|(ray://)?[^\s/:@]+:\d{1,5})$", max_length=300)] = "auto"
    """auto: the cluster that this machine belongs to. HOST:PORT: the same cluster, by the address of its head.
    ray://HOST:PORT: any cluster, by its head's port for clients (10001)."""
    scorer_cpus: Amount = 1.0
    """CPUs that Ray reserves for each scorer."""
    scorer_gpus: Amount = 0.0
    """GPUs, or a fraction of one, that Ray reserves for each scorer. The scorer sees no other GPUs."""
    scorer_resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom resources of each scorer, such as { sandbox = 1 }. Scorers run only on machines whose Ray was started with
    these resources."""
    verifier_cpus: Amount = 1.0
    """CPUs that Ray reserves for the verifier. The number of its threads is trust.verifier_threads."""
    verifier_gpus: Amount = 0.0
    """GPUs, or a fraction of one, for the verifier; 0 = the verifier uses CPUs."""
    verifier_resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom resources of the verifier, such as { base = 1 } for machines that have the base model. A model larger than
    512 MiB is not sent: these machines need a copy under the hub's path."""
    evaluator_cpus: Amount = 1.0
    """CPUs that Ray reserves for the process that draws evaluations. It computes with the same number of threads."""
    evaluator_gpus: Amount = 0.0
    """GPUs, or a fraction of one, for the process that draws evaluations; 0 = it uses CPUs."""
    evaluator_resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom resources of the process that draws evaluations: see verifier_resources."""
    working_dir: str = ""
    """Directory that is copied to each scorer's machine. The copy is the scorer's working directory, so it finds
    modules and files with relative paths there. Names with a leading dot are left out. Three things are sent even
    without this setting: the module of a task python:..., the files of a jsonl task, and the base model's tokenizer."""

    @field_validator("scorer_resources", "verifier_resources", "evaluator_resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        if own := {"CPU", "GPU", "memory", "object_store_memory"} & resources.keys():
            raise ValueError(
                f"{', '.join(sorted(own))} is Ray's own: use the settings of ray that end in _cpus and _gpus"
            )
        return resources

    def options(self, kind: WorkerKind) -> dict[str, Any]:
        """Return Ray's resource options for an actor of this kind."""
        return {
            "num_cpus": getattr(self, f"{kind}_cpus"),
            "num_gpus": getattr(self, f"{kind}_gpus"),
            "resources": getattr(self, f"{kind}_resources"),
        }

    def set_aside(self, kind: WorkerKind) -> str:
        """Return words that tell people which resources Ray reserves for a process of this kind."""
        wanted = {"CPU": getattr(self, f"{kind}_cpus"), "GPU": getattr(self, f"{kind}_gpus")}
        wanted |= getattr(self, f"{kind}_resources")
        return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount) or "nothing"
