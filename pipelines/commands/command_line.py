"""The words that `lockstep` takes: every command with its options."""

import argparse
from collections.abc import Callable, Mapping

from pipelines.commands.lineage_options import add_options
from pipelines.commands.lm_eval_options import add_options as add_lm_eval_options
from pipelines.commands.samples_options import add_options as add_samples_options
from pipelines.commands.session_options import add_options as add_session_options

Function = Callable[[argparse.Namespace], int | None]
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


def parser_of(functions: Mapping[str, Function]) -> argparse.ArgumentParser:
    """The parser; `functions` are what the commands do, by their names."""
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=functions[name])
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

    plan = add("plan", "Say what would run, why it is stale, and on which resources.")
    plan.add_argument("targets", nargs="*", help="stages to bring up to date (default: report)")
    add_profile(plan)
    add_json(plan)

    run = add("run", "Run the stale stages, in parallel where the graph allows it.")
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

    stage = add("stage", "Run one stage (what dvc.yaml calls; use `dvc repro` yourself).")
    stage.add_argument("address", help="sft, rollout@iter_001, ...")
    add_profile(stage)
    stage.add_argument("--dry-run", action="store_true", help="print the exact job script instead")

    add("code", "Write down which code each stage runs (what dvc.yaml calls: `dvc repro code`).")

    status = add("status", "Show how every stage fares; works while stages run.")
    status.add_argument(
        "--orphans", action="store_true", help="list live jobs that no stage wants instead"
    )
    add_json(status)

    cancel = add("cancel", "End live jobs, and those of the stages that need theirs.")
    cancel.add_argument("stages", nargs="*", help="stages whose jobs to end (default: all)")
    cancel.add_argument(
        "--orphans", action="store_true", help="end the live jobs that no stage wants instead"
    )

    record = add("record", "Have DVC record what jobs have finished unattended.")
    record.add_argument("targets", nargs="*", help="stages to record up to (default: report)")

    logs = add("logs", "Show what a stage's job wrote.")
    logs.add_argument("stage", help="sft, rollout@iter_001, ...")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")

    lineage = add(
        "lineage",
        "Say what made an artifact, what was made from it, or why two differ.",
    )
    add_options(lineage)
    add_json(lineage)

    shown = add("samples", "Show a policy's answers to the held-out prompts.")
    add_samples_options(shown)
    add_json(shown)

    compared = add("scores", "Say how far two scorings of the same rollouts agree, and where not.")
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

    harness = add("lm-eval", "Run lm-eval's tasks on a policy; needs the extra lm-eval.")
    add_lm_eval_options(harness)
    add_json(harness)

    preset = add("preset", "List presets, or merge some into params.yaml.")
    preset.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="presets/NAME.yaml, later over earlier (default: list them)",
    )
    preset.add_argument("--dry-run", action="store_true", help="only print what would change")
    add_json(preset)

    check = add("verify", "Hash every artifact again, and compare with dvc.lock.")
    check.add_argument(
        "targets", nargs="*", help="stages, or paths of outputs or in them (default: everything)"
    )
    check.add_argument(
        "--cache",
        action="store_true",
        help="also read all of DVC's cache, with what no dvc.lock of today names",
    )
    add_json(check)

    exporting = add("export", "Write a policy as a Hugging Face folder with its card.")
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

    registering = add("register", "Register a policy in MLflow's model registry.")
    registering.add_argument("policy", help="sft, iter_003, ...")
    registering.add_argument("--rev", metavar="REV", help="of this commit, tag or DVC experiment")
    registering.add_argument("--name", help="the registered model (default: the experiment's name)")
    registering.add_argument("--alias", help="let this alias, such as champion, point to it")
    add_json(registering)

    session = add("session", "Keep one process, with its models in memory, for stage after stage.")
    add_session_options(session, add_profile, add_json)

    add("sync", "Ship what MLflow has not got yet, and wait until it has it.")

    up = add("up", "Start an MLflow server and a Prefect server with a worker, on loopback.")
    up.add_argument("--mlflow-port", type=int, metavar="N", help="port of the MLflow server")
    up.add_argument("--prefect-port", type=int, metavar="N", help="port of the Prefect server")
    up.add_argument(
        "--no-schedules", action="store_true", help="deploy the flow with its schedules paused"
    )
    add("down", "Stop what `lockstep up` started.")

    doctor = add("doctor", "Check the environment and say what to fix.")
    add_json(doctor)
    return parser
