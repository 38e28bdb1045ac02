"""What a plan would cost: its stages with their resources, memory and last times.

Nothing runs and nothing in the workspace is written. Times are the last recorded ones; a stage that
is up to date, or restored from DVC's cache, costs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.base.console import seconds
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.memory import Estimator, MemoryUse
from pipelines.config.params import load_params
from pipelines.config.profiles import Resources, load_profile
from pipelines.dvc_repo.overrides import override
from pipelines.dvc_repo.plan import PlannedStage, make_plan
from pipelines.identity.code import CODE_STAGE
from pipelines.ledger.entry import Ledger
from pipelines.ledger.last_times import LastTime, last_time


@dataclass(frozen=True)
class StageCost:
    """A stage of the plan, and what it would take."""

    stage: PlannedStage
    resources: Resources
    memory: MemoryUse | None
    last: LastTime | None

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.stage),
            "resources": self.resources.model_dump(mode="json"),
            "memory": self.memory.as_json() if self.memory else None,
            "last_time": self.last.as_json() if self.last else None,
        }

    @property
    def runs(self) -> bool:
        """Whether there would be a job."""
        return self.stage.stale and not self.stage.cached and self.stage.address != CODE_STAGE

    @property
    def how(self) -> str:
        if self.stage.address == CODE_STAGE:
            return "update"
        return "restore" if self.stage.cached else "run"

    @property
    def where(self) -> str:
        return "at once" if self.stage.address == CODE_STAGE else described(self.resources)

    @property
    def took(self) -> str:
        """How long it took the last time, or one like it."""
        if self.last is None:
            return ""
        gpus = f" on {self.last.gpus} GPU" if self.last.gpus else ""
        like = "" if self.last.stage == self.stage.address else "like "
        return f"{like}{seconds(self.last.seconds)}{gpus}"


@dataclass(frozen=True)
class PlanCost:
    profile: str
    stages: tuple[StageCost, ...]
    """In the order in which they would run."""
    refusals: tuple[str, ...]
    """What does not fit its memory, and what to change."""
    unknown: str
    """Why memory could not be estimated."""

    @property
    def stale(self) -> list[StageCost]:
        return [cost for cost in self.stages if cost.stage.stale]

    def rows(self) -> list[dict[str, Any]]:
        return [cost.as_json() for cost in self.stages]

    def summary(self) -> list[str]:
        """How many stages, and how long their jobs would take one after the other."""
        jobs = [cost for cost in self.stages if cost.stage.address != CODE_STAGE]
        stale = [cost for cost in jobs if cost.stage.stale]
        restored = sum(cost.stage.cached for cost in stale)
        counts = [f"{len(stale) - restored} to run with profile {self.profile}"]
        counts += [f"{restored} to restore"] if restored else []
        said = ", ".join([*counts, f"{len(jobs) - len(stale)} up to date"])
        running = [cost for cost in self.stages if cost.runs]
        return [said, _total([cost.last for cost in running])] if running else [said]


def cost_of_plan(
    repository: Repository,
    targets: Sequence[str],
    profile: str | None,
    settings: Sequence[str] | None,
) -> PlanCost:
    """The plan for these targets with these settings in place of what params.yaml says."""
    changed = override(repository.root, settings) if settings else None
    params = changed.params if changed else load_params(repository.root)
    name = profile_name(profile)
    loaded = load_profile(repository.root, name)
    values = changed.values if changed else None
    planned = make_plan(repository.root, list(targets), params, values)
    estimator = Estimator(repository.root, params, name, loaded)
    kinds = dict.fromkeys(stage.address.split("@")[0] for stage in planned)
    uses: Mapping[str, MemoryUse | None] = {kind: estimator.use(kind) for kind in kinds}
    ledger = Ledger(repository.jobs)
    costs = []
    for stage in planned:
        kind = stage.address.split("@")[0]
        cost = StageCost(stage, loaded.resources(kind), uses[kind], None)
        last = last_time(ledger, stage.address) if cost.runs else None
        costs.append(StageCost(stage, cost.resources, cost.memory, last))
    stale = [cost.stage for cost in costs if cost.stage.stale]
    computed = dict.fromkeys(each.address.split("@")[0] for each in stale if not each.cached)
    refusals = tuple(said for kind in computed if (said := estimator.refusal(kind)))
    unknown = estimator.unknown if stale and estimator.unknown else ""
    return PlanCost(name, tuple(costs), refusals, unknown)


def described(resources: Resources) -> str:
    gpus = f"{resources.gpus_per_node} GPU " if resources.gpus_per_node else ""
    nodes = f"{resources.nodes} nodes " if resources.nodes > 1 else ""
    return f"{nodes}{gpus}{resources.cpus_per_task} CPU"


def _total(times: Sequence[LastTime | None]) -> str:
    known = [last for last in times if last]
    if not known:
        return "no time of these stages is recorded here"
    total = f"about {seconds(sum(last.seconds for last in known))} of jobs by their last times"
    gpus = sum(last.gpu_seconds for last in known)
    if gpus:
        total += f", {gpus / 3600:.2g} GPU hours"
    lacking = len(times) - len(known)
    return total + (f"; of {lacking} stages no time is recorded here" if lacking else "")
