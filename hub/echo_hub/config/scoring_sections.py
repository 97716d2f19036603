"""Where scorers run, and the Ray cluster for them and other processes of the hub's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from echo_hub.config.section import Section

Amount = Annotated[float, Field(ge=0, le=1e6)]
WorkerKind = Literal["scorer", "verifier", "evaluator"]
"""What may run in the cluster."""


class ScoringConfig(Section):
    """Where scorers run."""

    engine: Literal["local", "ray"] = "local"
    """local: in processes beside the hub. ray: in the same processes, each below a Ray actor somewhere in the cluster
    of [ray]; needs the extra `ray`. Either way there are task.scorer_processes of them, with the limits of [task]."""


class RayConfig(Section):
    """The Ray cluster, for scoring.engine, trust.verifier and evaluation.by where they are "ray"."""

    address: Annotated[str, Field(pattern=r"^(auto|(ray://)?[^\s/:@]+:\d{1,5})$", max_length=300)] = "auto"
    """auto: the cluster that this machine is part of. HOST:PORT: the same by the address of its head, of whose cluster
    this machine has to be part. ray://HOST:PORT: any cluster, by the port of its head for clients (10001)."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")] = "echo"
    """Of the actors' names, each of which begins with the run's id."""
    scorer_cpus: Amount = 1.0
    """CPUs that Ray sets aside for each scorer."""
    scorer_gpus: Amount = 0.0
    """GPUs, or a share of one, for each scorer: it sees no other."""
    scorer_resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom resources of each scorer, such as { sandbox = 1 }: it runs on machines alone that were started with them.
    """
    verifier_cpus: Amount = 1.0
    """CPUs that Ray sets aside for the verifier; it computes with trust.verifier_threads."""
    verifier_gpus: Amount = 0.0
    """GPUs, or a share of one, for the verifier: with 0 it computes on CPUs."""
    verifier_resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom resources of the verifier, such as { base = 1 } for the machines that have a base model of more than
    512 MiB, which is not sent: it has to lie there under the same path as on the hub's machine."""
    evaluator_cpus: Amount = 1.0
    """CPUs that Ray sets aside for the process that draws evaluations, which has as many threads."""
    evaluator_gpus: Amount = 0.0
    """GPUs, or a share of one, for that process: with 0 it computes on CPUs."""
    evaluator_resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom resources of that process: see verifier_resources."""
    working_dir: str = ""
    """A directory that is sent to each scorer, which works in a copy of it: for files that a task of yours reads by
    relative paths, and modules. What begins with a dot is left out. Sent without it: the module of a task python:..., a
    jsonl task's files, and the base model's tokenizer."""

    @field_validator("scorer_resources", "verifier_resources", "evaluator_resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        if own := {"CPU", "GPU", "memory", "object_store_memory"} & resources.keys():
            raise ValueError(
                f"{', '.join(sorted(own))} is Ray's own: use the settings of ray that end in _cpus and _gpus"
            )
        return resources

    def options(self, kind: WorkerKind) -> dict[str, Any]:
        """What Ray sets aside for each actor of a kind, by its own names."""
        return {
            "num_cpus": getattr(self, f"{kind}_cpus"),
            "num_gpus": getattr(self, f"{kind}_gpus"),
            "resources": getattr(self, f"{kind}_resources"),
        }

    def set_aside(self, kind: WorkerKind) -> str:
        """For people: the same."""
        wanted = {"CPU": getattr(self, f"{kind}_cpus"), "GPU": getattr(self, f"{kind}_gpus")}
        wanted |= getattr(self, f"{kind}_resources")
        return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount) or "nothing"
