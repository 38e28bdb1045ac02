import json
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.options import DEFAULT_TARGETS, Json, Profile, Targets

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    from pipelines.identity.code import CODE_STAGE
    from pipelines.runs.forecast import forecast

    seen = forecast(Repository.find().root, targets or DEFAULT_TARGETS, profile, settings)
    if as_json:
        print(json.dumps(seen.as_json(), indent=2))
        return
    stages = {stage.address: stage.address.split("@")[0] for stage in seen.planned}
    width = max(len(stage.address) for stage in seen.planned)
    needed = {stage: str(use) if use else "" for stage, use in seen.memory.items()}
    room = max((len(needed[stages[stage.address]]) for stage in seen.stale), default=0)
    took = {address: _took(address, last) for address, last in seen.times.items() if last}
    clock = max(map(len, took.values()), default=0)
    for stage in seen.stale:
        how = "restore" if stage.cached else "run"
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        of_stage = stages[stage.address]
        where = _describe(seen.resources[of_stage])
        if stage.address == CODE_STAGE:
            how, where = "update", "at once"
        last_of = f"{took.get(stage.address, ''):<{clock}}  " if clock else ""
        what = f"{needed[of_stage]:<{room}}  {reasons}" if room else reasons
        print(f"{how:<8}{stage.address:<{width}}  {where:<22}  {last_of}{what}")
        use = seen.memory[of_stage]
        for line in use.breakdown() if memory and use else ():
            print(f"{'':<8}{line}")
    for refusal in seen.unfit:
        print(f"does not fit: {refusal}")
    if seen.stale and seen.unknown:
        print(seen.unknown)
    if seen.stale and seen.advice:
        print(seen.advice)
    print(_counts(seen.planned, seen.profile))
    if seen.times:
        print(_cost(seen.times))


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


def _cost(times: "Mapping[str, LastTime | None]") -> str:
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
