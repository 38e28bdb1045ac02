"""What `lockstep run` would do: the plan, with each stage's resources, last time and memory."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.exchange import advice_on_exchange
from pipelines.config.memory import Estimator, MemoryUse
from pipelines.config.params import load_params
from pipelines.config.profiles import Resources, load_profile
from pipelines.dvc_repo.overrides import override
from pipelines.dvc_repo.plan import PlannedStage, make_plan
from pipelines.identity.code import CODE_STAGE
from pipelines.ledger.entry import Ledger
from pipelines.ledger.last_times import LastTime, last_time


@dataclass(frozen=True)
class Forecast:
    """Every stage that the targets need; resources and memory by the name of a stage."""

    profile: str
    planned: list[PlannedStage]
    resources: Mapping[str, Resources]
    memory: Mapping[str, MemoryUse | None]
    times: Mapping[str, LastTime | None]
    """Of the stages that would be computed, by address."""
    unfit: tuple[str, ...]
    """Why stages that would be computed do not fit."""
    unknown: str | None
    """Why memory is not estimated, where that is so."""
    advice: str | None
    """On how policies travel between the jobs."""

    @property
    def stale(self) -> list[PlannedStage]:
        return [stage for stage in self.planned if stage.stale]

    def as_json(self) -> list[dict[str, Any]]:
        rows = []
        for stage in self.planned:
            name = stage.address.split("@")[0]
            use, last = self.memory[name], self.times.get(stage.address)
            row = {**asdict(stage), "resources": self.resources[name].model_dump(mode="json")}
            row |= {"memory": use.as_json() if use else None}
            rows.append({**row, "last_time": last.as_json() if last else None})
        return rows


def forecast(
    root: Path, targets: list[str], profile: str | None, settings: list[str] | None = None
) -> Forecast:
    """`settings`: changes of params.yaml, as `dvc exp run -S` takes them; the file stays as is."""
    changed = override(root, settings) if settings else None
    params = changed.params if changed else load_params(root)
    name = profile_name(profile)
    loaded = load_profile(root, name)
    planned = make_plan(root, targets, params, changed.values if changed else None)
    stages = dict.fromkeys(stage.address.split("@")[0] for stage in planned)
    resources = {stage: loaded.resources(stage) for stage in stages}
    estimator = Estimator(root, params, name, loaded)
    computed = [stage.address for stage in planned if stage.stale and not stage.cached]
    ledger = Ledger(Repository(root).jobs)
    refusals = map(estimator.refusal, dict.fromkeys(each.split("@")[0] for each in computed))
    return Forecast(
        profile=name,
        planned=planned,
        resources=resources,
        memory={stage: estimator.use(stage) for stage in stages},
        times={each: last_time(ledger, each) for each in computed if each != CODE_STAGE},
        unfit=tuple(filter(None, refusals)),
        unknown=estimator.unknown,
        advice=advice_on_exchange(params, estimator.shapes.policy),
    )
