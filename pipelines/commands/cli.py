"""The command `lockstep`: dispatches, prints errors without tracebacks; imports late."""

import argparse
import json
import os
import sys
from typing import Any

from pipelines.base.console import say_anything
from pipelines.base.errors import LockstepError
from pipelines.base.owners import explain
from pipelines.commands.command_line import Function, parser_of


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    say_anything()
    parser = parser_of(_COMMANDS)
    arguments, left = parser.parse_known_args(argv)
    if left and (not hasattr(arguments, "words") or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    elif left:
        # argparse takes no words of one list from both sides of an option: `diff --rows A B`.
        arguments.words += left
    try:
        status = arguments.command(arguments)
        return int(status or 0)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read has seen enough; nothing more must be written, not even at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # A full or read-only disk, mostly: the message has the path, a traceback would hide it.
        print(f"lockstep: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130


def _plan(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.config.params import load_params
    from pipelines.config.profiles import load_profile, profile_name
    from pipelines.dvc_repo.plan import make_plan
    from pipelines.identity.code import CODE_STAGE

    repository = Repository.find()
    params = load_params(repository.root)
    name = profile_name(arguments.profile)
    profile = load_profile(repository.root, name)
    plan = make_plan(repository.root, arguments.targets or ["report"], params)
    resources = {stage.address: profile.resources(stage.address.split("@")[0]) for stage in plan}
    if arguments.json:
        rows = [
            {**stage.as_json(), "resources": resources[stage.address].model_dump(mode="json")}
            for stage in plan
        ]
        print(json.dumps(rows, indent=2))
        return
    width = max(len(stage.address) for stage in plan)
    for stage in (stage for stage in plan if stage.stale):
        how = "restore" if stage.cached else "run"
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        where = _describe(resources[stage.address])
        if stage.address == CODE_STAGE:
            how, where = "update", "at once"
        print(f"{how:<8}{stage.address:<{width}}  {where:<22}  {reasons}")
    plan = [stage for stage in plan if stage.address != CODE_STAGE]
    stale = [stage for stage in plan if stage.stale]
    restored = sum(stage.cached for stage in stale)
    counts = [f"{len(stale) - restored} to run with profile {name}"]
    counts += [f"{restored} to restore"] if restored else []
    print(", ".join([*counts, f"{len(plan) - len(stale)} up to date"]))


def _describe(resources: Any) -> str:
    gpus = f"{resources.gpus_per_node} GPU " if resources.gpus_per_node else ""
    nodes = f"{resources.nodes} nodes " if resources.nodes > 1 else ""
    return f"{nodes}{gpus}{resources.cpus_per_task} CPU"


def _run(arguments: argparse.Namespace) -> None:
    from pipelines.runs.run import run_pipeline

    run_pipeline(
        arguments.targets or ["report"],
        arguments.profile,
        dry_run=arguments.dry_run,
        detach=arguments.detach,
        chain=arguments.chain,
    )


def _stage(arguments: argparse.Namespace) -> None:
    from pipelines.driver.stage import render_stage, run_stage

    if arguments.dry_run:
        print(render_stage(arguments.address, arguments.profile))
    else:
        run_stage(arguments.address, arguments.profile)


def _code(_: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.identity.map_files import write_maps
    from stages.contracts.catalog import STAGES

    write_maps(Repository.find(), [stage.module for stage in STAGES.values()])


def _status(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.driver.orphans import find_orphans
    from pipelines.runs.status import render, stage_statuses
    from pipelines.tracking.shipper import problem
    from pipelines.worker.session import describe, living

    repository = Repository.find()
    if arguments.orphans:
        found = find_orphans(repository)
        if arguments.json:
            print(json.dumps([orphan.as_json() for orphan in found], indent=2))
            return
        for orphan in found:
            print(f"job {orphan.job}: {orphan.what}  {orphan.where}".rstrip())
        print("`lockstep cancel --orphans` ends them" if found else "no live job is unwanted")
        return
    statuses = stage_statuses(repository)
    if arguments.json:
        print(json.dumps([status.as_json() for status in statuses], indent=2))
        return
    print(render(statuses))
    for session in living(repository):
        print(f"session {describe(session)}")
    trouble = problem(repository)
    if trouble:
        print(trouble)


def _cancel(arguments: argparse.Namespace) -> None:
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.commands.cancel import cancel, cancel_orphans

    if arguments.orphans:
        if arguments.stages:
            raise LockstepError("name stages, or say --orphans, not both")
        cancel_orphans(Repository.find(), Console())
    else:
        cancel(Repository.find(), arguments.stages, Console())


def _record(arguments: argparse.Namespace) -> None:
    from pipelines.runs.record import record

    record(arguments.targets or ["report"])


def _logs(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.slurm.logs import show_logs

    show_logs(Repository.find(), arguments.stage, sys.stdout.write, follow=arguments.follow)


def _lineage(arguments: argparse.Namespace) -> int:
    from pipelines.commands.lineage import lineage
    from pipelines.commands.lineage_options import question_of

    return lineage(question_of(arguments))


def _samples(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.results.samples import samples

    print(samples(Repository.find().root, arguments))


def _scores(arguments: argparse.Namespace) -> int:
    from pipelines.results.scores import scores

    if arguments.limit < 0:
        raise LockstepError(f"--limit is a number from 0 up, not {arguments.limit}")
    return scores(
        arguments.one,
        arguments.other,
        arguments.source,
        arguments.limit,
        as_json=arguments.json,
    )


def _lm_eval(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.results.lm_eval import lm_eval

    print(lm_eval(Repository.find(), arguments))


def _preset(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.config.presets import load_presets, merge, render_changes, render_list, write

    root = Repository.find().root
    presets = load_presets(root, arguments.names)
    if not arguments.names:
        as_json = [preset.as_json() for preset in presets]
        print(json.dumps(as_json, indent=2) if arguments.json else render_list(presets))
        return
    merged = merge(root, presets)
    if merged.changes and not arguments.dry_run:
        write(root, merged)
    if arguments.json:
        print(json.dumps([change.as_json() for change in merged.changes], indent=2))
    elif not merged.changes:
        print("nothing to change: params.yaml says it already")
    else:
        print(render_changes(merged.changes))
        if arguments.dry_run:
            print("params.yaml is as it was; without --dry-run these values are written")
        else:
            print("params.yaml is changed; `lockstep plan` says what would run")


def _verify(arguments: argparse.Namespace) -> int:
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.results.verify import verify
    from pipelines.results.verify_report import Reading, render

    repository, console = Repository.find(), Console(sys.stderr)
    reading = Reading(console)
    try:
        verdict = verify(
            repository,
            arguments.targets,
            whole_cache=arguments.cache,
            progress=reading.show,
        )
    finally:
        console.clear()
    print(
        json.dumps(verdict.as_json(), indent=2)
        if arguments.json
        else render(verdict, repository.root)
    )
    return 1 if verdict.findings else 0


def _export(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from pipelines.base.repository import Repository
    from pipelines.export.folder import export

    done = export(
        Repository.find(),
        arguments.policy,
        Path(arguments.folder),
        revision=arguments.rev,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        force=arguments.force,
    )
    if arguments.json:
        print(json.dumps(done.as_json(), indent=2))
    else:
        print(f"{done.provenance.policy} {done.provenance.artifact.hash} is in {done.folder}")


def _register(arguments: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.export.registry import register

    done = register(
        Repository.find(),
        arguments.policy,
        revision=arguments.rev,
        name=arguments.name,
        alias=arguments.alias,
    )
    print(json.dumps(done.as_json(), indent=2) if arguments.json else done.text)


def _session(arguments: argparse.Namespace) -> None:
    from pipelines.commands.session_command import session_command

    session_command(arguments)


def _sync(_: argparse.Namespace) -> None:
    from pipelines.base.repository import Repository
    from pipelines.tracking.rounds import ship_all
    from pipelines.tracking.shipper import problem

    repository = Repository.find()
    left = ship_all(repository)
    if left:
        raise LockstepError(problem(repository) or f"{len(left)} stages are not shipped yet")
    print("MLflow has everything")


def _up(arguments: argparse.Namespace) -> None:
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.servers.servers import up

    up(
        Repository.find(),
        Console(),
        mlflow_port=arguments.mlflow_port,
        prefect_port=arguments.prefect_port,
        schedules=not arguments.no_schedules,
    )


def _down(_: argparse.Namespace) -> None:
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.servers.servers import down

    down(Repository.find(), Console())


def _doctor(arguments: argparse.Namespace) -> int:
    from pipelines.base.repository import Repository
    from pipelines.commands.doctor import examine, render

    findings = examine(Repository.find())
    if arguments.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        print(render(findings))
    return 0 if all(finding.fine for finding in findings) else 1


_COMMANDS: dict[str, Function] = {
    "plan": _plan,
    "run": _run,
    "stage": _stage,
    "code": _code,
    "status": _status,
    "cancel": _cancel,
    "record": _record,
    "logs": _logs,
    "lineage": _lineage,
    "samples": _samples,
    "scores": _scores,
    "lm-eval": _lm_eval,
    "preset": _preset,
    "verify": _verify,
    "export": _export,
    "register": _register,
    "session": _session,
    "sync": _sync,
    "up": _up,
    "down": _down,
    "doctor": _doctor,
}
