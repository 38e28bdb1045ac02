import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipelines.commands.options import DEFAULT_TARGETS, Json, Profile, Targets

if TYPE_CHECKING:
    from pipelines.config.profiles import Resources


def plan(targets: Targets = None, profile: Profile = None, as_json: Json = False) -> None:
    """Say what would run, why it is stale, and on which resources."""
    from pipelines.base.repository import Repository
    from pipelines.config.params import load_params
    from pipelines.config.profiles import load_profile, profile_name
    from pipelines.dvc_repo.plan import make_plan
    from pipelines.identity.code import CODE_STAGE

    repository = Repository.find()
    params = load_params(repository.root)
    name = profile_name(profile)
    loaded = load_profile(repository.root, name)
    planned = make_plan(repository.root, targets or DEFAULT_TARGETS, params)
    resources = {stage.address: loaded.resources(stage.address.split("@")[0]) for stage in planned}
    if as_json:
        rows = [
            {**asdict(stage), "resources": resources[stage.address].model_dump(mode="json")}
            for stage in planned
        ]
        print(json.dumps(rows, indent=2))
        return
    width = max(len(stage.address) for stage in planned)
    for stage in (stage for stage in planned if stage.stale):
        how = "restore" if stage.cached else "run"
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        where = _describe(resources[stage.address])
        if stage.address == CODE_STAGE:
            how, where = "update", "at once"
        print(f"{how:<8}{stage.address:<{width}}  {where:<22}  {reasons}")
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
