"""The command `lockstep`: parses, dispatches, prints errors without tracebacks; imports late."""

import argparse
import json
import os
import sys
from typing import Any

from pipelines.console import say_anything
from pipelines.errors import LockstepError
from pipelines.lineage.options import add_options
from pipelines.lm_eval_options import add_options as add_lm_eval_options
from pipelines.samples_options import add_options as add_samples_options
from pipelines.session_options import add_options as add_session_options

_DESCRIPTION = """\
An RLHF pipeline as one versioned graph: SFT, reward model, rollouts, scores, policy updates.

  lockstep plan        what would run, and why
  lockstep run         bring everything up to date (the same as `dvc repro`, in parallel)
  lockstep status      how every stage fares
  lockstep logs sft    what a stage wrote
  lockstep cancel sft  end its job, and those that wait for it
  lockstep lineage X   what made an artifact; `lineage diff X Y`: why two differ
  lockstep samples     read what a policy answers; --lost: where it was better before
  lockstep scores A B  how far two scorings of the same rollouts agree
  lockstep verify      read every artifact again, and say what is not as it was recorded
  lockstep preset grpo set params.yaml to a named choice of values
  lockstep session up  keep a process with its models between the stages of the loop
  lockstep export sft DIR     a policy as a Hugging Face folder with a model card
  lockstep register sft       a policy as a version in MLflow's model registry
  lockstep up          start MLflow and Prefect on this machine
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    say_anything()
    parser = _parser()
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
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        return command

    def add_profile(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--profile",
            metavar="NAME",
            help="slurm_profiles/NAME.yaml: where and on what the stages run "
            "(default: LOCKSTEP_PROFILE, else local)",
        )

    def add_json(command: argparse.ArgumentParser) -> None:
        command.add_argument("--json", action="store_true", help="JSON, for programs")

    plan = add("plan", _plan, "Say what would run, why it is stale, and on which resources.")
    plan.add_argument("targets", nargs="*", help="stages to bring up to date (default: report)")
    add_profile(plan)
    add_json(plan)

    run = add("run", _run, "Run the stale stages, in parallel where the graph allows it.")
    run.add_argument("targets", nargs="*", help="stages to bring up to date (default: report)")
    add_profile(run)
    how = run.add_mutually_exclusive_group()
    how.add_argument(
        "--dry-run", action="store_true", help="print the exact job scripts instead of running"
    )
    how.add_argument(
        "--detach", action="store_true", help="submit the stages that are ready, and return"
    )
    how.add_argument(
        "--chain",
        action="store_true",
        help="submit all stale stages to Slurm, each to start after those it needs, and return",
    )

    stage = add("stage", _stage, "Run one stage (what dvc.yaml calls; use `dvc repro` yourself).")
    stage.add_argument("address", help="sft, rollout@iter_001, ...")
    add_profile(stage)
    stage.add_argument("--dry-run", action="store_true", help="print the exact job script instead")

    status = add("status", _status, "Show how every stage fares; works while stages run.")
    status.add_argument(
        "--orphans", action="store_true", help="list live jobs that no stage wants instead"
    )
    add_json(status)

    cancel = add("cancel", _cancel, "End live jobs, and those of the stages that need theirs.")
    cancel.add_argument("stages", nargs="*", help="stages whose jobs to end (default: all)")
    cancel.add_argument(
        "--orphans", action="store_true", help="end the live jobs that no stage wants instead"
    )

    record = add("record", _record, "Have DVC record what jobs have finished unattended.")
    record.add_argument("targets", nargs="*", help="stages to record up to (default: report)")

    logs = add("logs", _logs, "Show what a stage's job wrote.")
    logs.add_argument("stage", help="sft, rollout@iter_001, ...")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")

    lineage = add(
        "lineage",
        _lineage,
        "Say what made an artifact, what was made from it, or why two differ.",
    )
    add_options(lineage)
    add_json(lineage)

    shown = add("samples", _samples, "Show a policy's answers to the held-out prompts.")
    add_samples_options(shown)
    add_json(shown)

    compared = add(
        "scores", _scores, "Say how far two scorings of the same rollouts agree, and where not."
    )
    compared.add_argument("one", metavar="A", help="iter_001, HEAD~1:iter_001, a path or a hash")
    compared.add_argument("other", metavar="B", help="another scoring of the same rollouts")
    compared.add_argument(
        "--source",
        metavar="NAME",
        help="compare what this source said, not the rewards; ONE,OTHER: a source of each",
    )
    compared.add_argument(
        "--limit", type=int, default=10, metavar="N", help="responses to show (default: 10)"
    )
    add_json(compared)

    harness = add("lm-eval", _lm_eval, "Run lm-eval's tasks on a policy; needs the extra lm-eval.")
    add_lm_eval_options(harness)
    add_json(harness)

    preset = add("preset", _preset, "List presets, or merge some into params.yaml.")
    preset.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="presets/NAME.yaml, later over earlier (default: list them)",
    )
    preset.add_argument("--dry-run", action="store_true", help="only print what would change")
    add_json(preset)

    check = add("verify", _verify, "Hash every artifact again, and compare with dvc.lock.")
    check.add_argument(
        "targets", nargs="*", help="stages, or paths of outputs or in them (default: everything)"
    )
    check.add_argument(
        "--cache",
        action="store_true",
        help="also read all of DVC's cache, with what no dvc.lock of today names",
    )
    add_json(check)

    exporting = add("export", _export, "Write a policy as a Hugging Face folder with its card.")
    exporting.add_argument("policy", help="sft, iter_003, ...")
    exporting.add_argument("folder", help="where to write it; must not be there yet")
    exporting.add_argument("--rev", metavar="REV", help="of this commit, tag or DVC experiment")
    exporting.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="round the weights to this type"
    )
    form = exporting.add_mutually_exclusive_group()
    form.add_argument("--adapter", action="store_true", help="the adapter beside its base")
    form.add_argument("--merged", action="store_true", help="one model, adapter merged (default)")
    exporting.add_argument("--force", action="store_true", help="replace a folder that is there")
    add_json(exporting)

    registering = add("register", _register, "Register a policy in MLflow's model registry.")
    registering.add_argument("policy", help="sft, iter_003, ...")
    registering.add_argument("--rev", metavar="REV", help="of this commit, tag or DVC experiment")
    registering.add_argument("--name", help="the registered model (default: the experiment's name)")
    registering.add_argument("--alias", help="let this alias, such as champion, point to it")
    add_json(registering)

    session = add(
        "session", _session, "Keep one process, with its models in memory, for stage after stage."
    )
    add_session_options(session, add_profile, add_json)

    add("sync", _sync, "Ship what MLflow has not got yet, and wait until it has it.")

    up = add("up", _up, "Start an MLflow server and a Prefect server with a worker, on loopback.")
    up.add_argument("--mlflow-port", type=int, metavar="N", help="port of the MLflow server")
    up.add_argument("--prefect-port", type=int, metavar="N", help="port of the Prefect server")
    up.add_argument(
        "--no-schedules", action="store_true", help="deploy the flow with its schedules paused"
    )
    add("down", _down, "Stop what `lockstep up` started.")

    doctor = add("doctor", _doctor, "Check the environment and say what to fix.")
    add_json(doctor)
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    from pipelines.params import load_params
    from pipelines.plan import make_plan
    from pipelines.profiles import load_profile, profile_name
    from pipelines.repository import Repository

    repository = Repository.find()
    load_params(repository.root)
    name = profile_name(arguments.profile)
    profile = load_profile(repository.root, name)
    plan = make_plan(repository.root, arguments.targets or ["report"])
    resources = {stage.address: profile.resources(stage.address.split("@")[0]) for stage in plan}
    if arguments.json:
        rows = [
            {**stage.as_json(), "resources": resources[stage.address].model_dump(mode="json")}
            for stage in plan
        ]
        print(json.dumps(rows, indent=2))
        return
    stale = [stage for stage in plan if stage.stale]
    width = max(len(stage.address) for stage in plan)
    for stage in stale:
        how = "restore" if stage.cached else "run"
        reasons = ", ".join(stage.reasons[:3]) + (", ..." if len(stage.reasons) > 3 else "")
        where = _describe(resources[stage.address])
        print(f"{how:<8}{stage.address:<{width}}  {where:<22}  {reasons}")
    fresh = len(plan) - len(stale)
    print(f"{len(stale)} to run with profile {name}, {fresh} up to date")


def _describe(resources: Any) -> str:
    gpus = f"{resources.gpus_per_node} GPU " if resources.gpus_per_node else ""
    nodes = f"{resources.nodes} nodes " if resources.nodes > 1 else ""
    return f"{nodes}{gpus}{resources.cpus_per_task} CPU"


def _run(arguments: argparse.Namespace) -> None:
    from pipelines.run import run_pipeline

    run_pipeline(
        arguments.targets or ["report"],
        arguments.profile,
        dry_run=arguments.dry_run,
        detach=arguments.detach,
        chain=arguments.chain,
    )


def _stage(arguments: argparse.Namespace) -> None:
    from pipelines.stage import render_stage, run_stage

    if arguments.dry_run:
        print(render_stage(arguments.address, arguments.profile))
    else:
        run_stage(arguments.address, arguments.profile)


def _status(arguments: argparse.Namespace) -> None:
    from pipelines.orphans import find_orphans
    from pipelines.repository import Repository
    from pipelines.session import describe, living
    from pipelines.shipper import problem
    from pipelines.status import render, stage_statuses

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
    from pipelines.cancel import cancel, cancel_orphans
    from pipelines.console import Console
    from pipelines.repository import Repository

    if arguments.orphans:
        if arguments.stages:
            raise LockstepError("name stages, or say --orphans, not both")
        cancel_orphans(Repository.find(), Console())
    else:
        cancel(Repository.find(), arguments.stages, Console())


def _record(arguments: argparse.Namespace) -> None:
    from pipelines.record import record

    record(arguments.targets or ["report"])


def _logs(arguments: argparse.Namespace) -> None:
    from pipelines.logs import show_logs
    from pipelines.repository import Repository

    show_logs(Repository.find(), arguments.stage, sys.stdout.write, follow=arguments.follow)


def _lineage(arguments: argparse.Namespace) -> int:
    from pipelines.lineage.command import lineage
    from pipelines.lineage.options import question_of

    return lineage(question_of(arguments))


def _samples(arguments: argparse.Namespace) -> None:
    from pipelines.repository import Repository
    from pipelines.samples import samples

    print(samples(Repository.find().root, arguments))


def _scores(arguments: argparse.Namespace) -> int:
    from pipelines.scores import scores

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
    from pipelines.lm_eval import lm_eval
    from pipelines.repository import Repository

    print(lm_eval(Repository.find(), arguments))


def _preset(arguments: argparse.Namespace) -> None:
    from pipelines.presets import load_presets, merge, render_changes, render_list, write
    from pipelines.repository import Repository

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
    from pipelines.console import Console
    from pipelines.repository import Repository
    from pipelines.verify import verify
    from pipelines.verify_report import Reading, render

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

    from pipelines.export.command import export
    from pipelines.repository import Repository

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
    from pipelines.export.registry import register
    from pipelines.repository import Repository

    done = register(
        Repository.find(),
        arguments.policy,
        revision=arguments.rev,
        name=arguments.name,
        alias=arguments.alias,
    )
    print(json.dumps(done.as_json(), indent=2) if arguments.json else done.text)


def _session(arguments: argparse.Namespace) -> None:
    from pipelines.session_command import session_command

    session_command(arguments)


def _sync(_: argparse.Namespace) -> None:
    from pipelines.repository import Repository
    from pipelines.shipper import problem
    from pipelines.tracking import ship_all

    repository = Repository.find()
    left = ship_all(repository)
    if left:
        raise LockstepError(problem(repository) or f"{len(left)} stages are not shipped yet")
    print("MLflow has everything")


def _up(arguments: argparse.Namespace) -> None:
    from pipelines.console import Console
    from pipelines.repository import Repository
    from pipelines.servers import up

    up(
        Repository.find(),
        Console(),
        mlflow_port=arguments.mlflow_port,
        prefect_port=arguments.prefect_port,
        schedules=not arguments.no_schedules,
    )


def _down(_: argparse.Namespace) -> None:
    from pipelines.console import Console
    from pipelines.repository import Repository
    from pipelines.servers import down

    down(Repository.find(), Console())


def _doctor(arguments: argparse.Namespace) -> int:
    from pipelines.doctor import examine, render
    from pipelines.repository import Repository

    findings = examine(Repository.find())
    if arguments.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        print(render(findings))
    return 0 if all(finding.fine for finding in findings) else 1
