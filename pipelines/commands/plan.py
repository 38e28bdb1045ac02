import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS, Json, Profile, Targets

if TYPE_CHECKING:
    from pipelines.config.profiles import Resources
    from pipelines.dvc_repo.plan import PlannedStage
    from pipelines.ledger.last_times import LastTime


def plan(
    targets: Targets = None,
    profile: Profile = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "-S",
            "--set-param",
            metavar="KEY=VALUE",
            help="as in `dvc exp run -S`: what this would change; params.yaml stays as it is",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="show what takes the memory of each stage")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what would run, why it is stale, on which resources, its last time and its memory."""
    from pipelines.base.repository import Repository
    from pipelines.config.chosen_profile import profile_name
    from pipelines.config.memory import Estimator
    from pipelines.config.params import load_params
    from pipelines.config.profiles import load_profile
    from pipelines.dvc_repo.overrides import override
    from pipelines.dvc_repo.plan import make_plan
    from pipelines.identity.code import CODE_STAGE
    from pipelines.ledger.entry import Ledger
    from pipelines.ledger.last_times import last_time

    repository = Repository.find()
    changed = override(repository.root, settings) if settings else None
    params = changed.params if changed else load_params(repository.root)
    name = profile_name(profile)
    loaded = load_profile(repository.root, name)
    values = changed.values if changed else None
    planned = make_plan(repository.root, targets or DEFAULT_TARGETS, params, values)
    stages = {stage.address: stage.address.split("@")[0] for stage in planned}
    resources = {stage: loaded.resources(stage) for stage in stages.values()}
    estimator = Estimator(repository.root, params, name, loaded)
    uses = {stage: estimator.use(stage) for stage in resources}
    ledger = Ledger(repository.jobs)
    times = {
        stage.address: last_time(ledger, stage.address)
        for stage in planned
        if stage.stale and not stage.cached and stage.address != CODE_STAGE
    }
    if as_json:
        rows = []
        for stage in planned:
            use, of = uses[stages[stage.address]], resources[stages[stage.address]]
            last = times.get(stage.address)
            row = {**asdict(stage), "resources": of.model_dump(mode="json")}
            row |= {"memory": use.as_json() if use else None}
            rows.append({**row, "last_time": last.as_json() if last else None})
        print(json.dumps(rows, indent=2))
        return
    stale = [stage for stage in planned if stage.stale]
    width = max(len(stage.address) for stage in planned)
    needed = {stage: str(use) if use else "" for stage, use in uses.items()}
    room = max((len(needed[stages[stage.address]]) for stage in stale), default=0)
    took = {address: _took(address, last) for address, last in times.items() if last}
    clock = max(map(len, took.values()), default=0)
    for stage in stale:
        how = "restore" if stage.cached else "run"
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        of_stage = stages[stage.address]
        where = _describe(resources[of_stage])
        if stage.address == CODE_STAGE:
            how, where = "update", "at once"
        last_of = f"{took.get(stage.address, ''):<{clock}}  " if clock else ""
        what = f"{needed[of_stage]:<{room}}  {reasons}" if room else reasons
        print(f"{how:<8}{stage.address:<{width}}  {where:<22}  {last_of}{what}")
        use = uses[of_stage]
        for line in use.breakdown() if memory and use else ():
            print(f"{'':<8}{line}")
    for of_stage in dict.fromkeys(stages[stage.address] for stage in stale if not stage.cached):
        if said := estimator.refusal(of_stage):
            print(f"does not fit: {said}")
    if stale and estimator.unknown:
        print(estimator.unknown)
    print(_counts(planned, name))
    if times:
        print(_cost(times))


def _counts(planned: "list[PlannedStage]", profile: str) -> str:
    from pipelines.identity.code import CODE_STAGE

    planned = [stage for stage in planned if stage.address != CODE_STAGE]
    stale = [stage for stage in planned if stage.stale]
    restored = sum(stage.cached for stage in stale)
    counts = [f"{len(stale) - restored} to run with profile {profile}"]
    counts += [f"{restored} to restore"] if restored else []
    return ", ".join([*counts, f"{len(planned) - len(stale)} up to date"])


def _took(address: str, last: "LastTime") -> str:
    from pipelines.base.console import seconds

    gpus = f" on {last.gpus} GPU" if last.gpus else ""
    return f"{'' if last.stage == address else 'like '}{seconds(last.seconds)}{gpus}"


def _cost(times: "dict[str, LastTime | None]") -> str:
    """The sum of the jobs' times, one after the other."""
    from pipelines.base.console import seconds

    known = [last for last in times.values() if last]
    if not known:
        return "no time of these stages is recorded here"
    total = f"about {seconds(sum(last.seconds for last in known))} of jobs by their last times"
    gpus = sum(last.gpu_seconds for last in known)
    if gpus:
        total += f", {gpus / 3600:.2g} GPU hours"
    lacking = len(times) - len(known)
    return total + (f"; of {lacking} stages no time is recorded here" if lacking else "")


def _describe(resources: "Resources") -> str:
    gpus = f"{resources.gpus_per_node} GPU " if resources.gpus_per_node else ""
    nodes = f"{resources.nodes} nodes " if resources.nodes > 1 else ""
    return f"{nodes}{gpus}{resources.cpus_per_task} CPU"
