import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS, Json, Profile, Targets

if TYPE_CHECKING:
    from pipelines.config.profiles import Resources


def plan(
    targets: Targets = None,
    profile: Profile = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="show what takes the memory of each stage")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what would run, why it is stale, on which resources, and the memory that it needs."""
    from pipelines.base.repository import Repository
    from pipelines.config.chosen_profile import profile_name
    from pipelines.config.memory import Estimator
    from pipelines.config.params import load_params
    from pipelines.config.profiles import load_profile
    from pipelines.dvc_repo.plan import make_plan
    from pipelines.identity.code import CODE_STAGE

    repository = Repository.find()
    params = load_params(repository.root)
    name = profile_name(profile)
    loaded = load_profile(repository.root, name)
    planned = make_plan(repository.root, targets or DEFAULT_TARGETS, params)
    stages = {stage.address: stage.address.split("@")[0] for stage in planned}
    resources = {stage: loaded.resources(stage) for stage in stages.values()}
    estimator = Estimator(repository.root, params, name, loaded)
    uses = {stage: estimator.use(stage) for stage in resources}
    if as_json:
        rows = []
        for stage in planned:
            use, of = uses[stages[stage.address]], resources[stages[stage.address]]
            row = {**asdict(stage), "resources": of.model_dump(mode="json")}
            rows.append({**row, "memory": use.as_json() if use else None})
        print(json.dumps(rows, indent=2))
        return
    stale = [stage for stage in planned if stage.stale]
    width = max(len(stage.address) for stage in planned)
    needed = {stage: str(use) if use else "" for stage, use in uses.items()}
    room = max((len(needed[stages[stage.address]]) for stage in stale), default=0)
    for stage in stale:
        how = "restore" if stage.cached else "run"
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        of_stage = stages[stage.address]
        where = _describe(resources[of_stage])
        if stage.address == CODE_STAGE:
            how, where = "update", "at once"
        what = f"{needed[of_stage]:<{room}}  {reasons}" if room else reasons
        print(f"{how:<8}{stage.address:<{width}}  {where:<22}  {what}")
        use = uses[of_stage]
        for line in use.breakdown() if memory and use else ():
            print(f"{'':<8}{line}")
    for of_stage in dict.fromkeys(stages[stage.address] for stage in stale if not stage.cached):
        if said := estimator.refusal(of_stage):
            print(f"does not fit: {said}")
    if stale and estimator.unknown:
        print(estimator.unknown)
    planned = [stage for stage in planned if stage.address != CODE_STAGE]
    stale = [stage for stage in planned if stage.stale]
    restored = sum(stage.cached for stage in stale)
    counts = [f"{len(stale) - restored} to run with profile {name}"]
    counts += [f"{restored} to restore"] if restored else []
    print(", ".join([*counts, f"{len(planned) - len(stale)} up to date"]))


def _describe(resources: "Resources") -> str:
    gpus = f"{resources.gpus_per_node} GPU " if resources.gpus_per_node else ""
    nodes = f"{resources.nodes} nodes " if resources.nodes > 1 else ""
    return f"{nodes}{gpus}{resources.cpus_per_task} CPU"
