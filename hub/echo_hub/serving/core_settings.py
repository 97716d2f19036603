"""Translate a run's settings into those of the coordinator."""

from __future__ import annotations

from echo_hub.config.objective_change import ObjectiveRules, as_text
from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.accounting.parameters import RulesOfGroups, SessionRules
from echo_hub.core.activation.settings import ActivationSettings
from echo_hub.core.policy.curriculum import CurriculumSettings
from echo_hub.core.policy.mixture import Mixture, TrainedTask
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.tenant_names import TenantNames
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.scoring.problems import Problems


def trained_tasks(problems: Problems) -> tuple[TrainedTask, ...]:
    """Return the run's training tasks for the coordinator, in the order of the settings."""
    return tuple(
        TrainedTask(key=key, solved_at=task.rewards.solved_at, lowest=task.rewards.lowest)
        for key, task in problems.tasks.items()
    )


def rules_by_task(config: HubConfig, problems: Problems) -> dict[str, SessionRules]:
    """Return the rules of the sessions of each task with state, by task key."""
    return {
        key: SessionRules(
            verify_first=bool(getattr(task.stateful, "verify_first", False)), losses=config.sessions.losses
        )
        for key, task in problems.tasks.items()
        if task.stateful is not None
    }


def session_rules(config: HubConfig, problems: Problems) -> RulesOfGroups | None:
    """Return the function from a group's id to the rules of its sessions; None if no task of the run has state."""
    rules = rules_by_task(config, problems)
    return (lambda group_id: rules.get(problems.task_of(group_id))) if rules else None


def _curriculum(training: TrainingConfig) -> CurriculumSettings | None:
    if training.curriculum == "off":
        return None
    return CurriculumSettings(rule=training.curriculum, by=training.curriculum_by)


def coordinator_settings(
    config: HubConfig,
    *,
    multi_turn: bool,
    secret: bytes = b"",
    tasks: tuple[TrainedTask, ...] = (),
    gguf_precision: str = "",
    session_rules: RulesOfGroups | None = None,
) -> CoordinatorSettings:
    """Return the coordinator's settings. `secret` selects the rollouts to check. `tasks` are the run's tasks, in the
    order of the settings. `gguf_precision`: see `TrustSettings`. `session_rules`: see `CoordinatorSettings`."""
    sets, members = config.evaluation_sets, config.task.members
    weights = [task.weight for task in members.values()]
    return CoordinatorSettings(
        mode=config.run.mode,
        trains=config.trains,
        steps=config.training.steps,
        groups_per_step=config.training.groups_per_step,
        group_size=config.training.group_size,
        deadline_s=config.leases.deadline_s,
        first_window=config.leases.first_window,
        max_staleness=config.training.max_staleness,
        publish_every=config.training.publish_every,
        learning_rate=config.training.learning_rate,
        objective=as_text(config.objective),
        change_objective=ObjectiveRules(config),
        interrupts=config.training.on_new_version == "interrupt",
        multi_turn=multi_turn,
        dynamic_sampling=config.training.dynamic_sampling,
        curriculum=_curriculum(config.training),
        discount=config.training.discount if config.training.credit == "turn" else None,
        tokens_per_step=config.training.tokens_per_step,
        run_seed=config.run.seed,
        evaluation_problems=sets[-1].numbers.stop if sets and config.evaluation.by == "nodes" else 0,
        evaluation_samples=sets[0].samples if sets else 0,
        evaluation_ends=tuple((one.numbers.stop, one.samples) for one in sets) if len(sets) > 1 else (),
        mixture=Mixture.of(config.run.seed, weights) if len(members) > 1 else None,
        tasks=tasks,
        session_rules=session_rules,
        activation=ActivationSettings(
            spend_cap_per_hour=config.cost.spend_cap_per_hour,
            margin=config.cost.margin,
            dwell_s=config.cost.dwell_s,
        ),
        tenant_names=TenantNames(secret=secret, shown=config.tenants.show_names),
        trust=TrustSettings(
            enabled=config.trust.verifier != "off",
            by_nodes=config.trust.verifier == "nodes",
            check_deadline_s=config.leases.deadline_s,
            secret=secret,
            least_checked=config.trust.least_checked,
            first_checked=config.trust.first_checked,
            temperature=config.sampling.temperature,
            gguf_precision=gguf_precision,
        ),
    )
