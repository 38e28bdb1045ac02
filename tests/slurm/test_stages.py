"""Stages on a real cluster: the same bytes as at home, from the very script that is shown."""

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import STAGE, RunOnSlurm
from tests.waiting import ended, failed


@pytest.mark.slow
def test_the_whole_pipeline_makes_the_same_bytes_as_without_slurm(
    pipeline_on_slurm: RunOnSlurm, pipeline_lock: str
) -> None:
    clone = pipeline_on_slurm.clone
    assert "all 9 stages are up to date" in pipeline_on_slurm.output
    assert clone.lock() == pipeline_lock
    record = next(clone.root.glob(".lockstep/jobs/sft/*/record.json"))
    assert json.loads(record.read_text())["attempts"] == 1
    clone.until(lambda: not clone.jobs(), "an empty queue")


def test_dvc_repro_submits_with_the_script_that_a_dry_run_shows(quick_sft: Any) -> None:
    shown = quick_sft.run("lockstep", "run", "--dry-run", "sft").stdout
    assert "# submit it by hand:  sbatch " in shown
    assert "# follow it:          tail -F " in shown
    output = quick_sft.run("dvc", "repro", "--single-item", "sft").stdout
    assert "sft: submitted to slurm-dev as job" in output
    submitted = next(quick_sft.root.glob(".lockstep/jobs/sft/*/attempts/*/*_submission.sh"))
    script = submitted.read_text().splitlines()
    assert _without_names(script) == _without_names(shown.splitlines()[: len(script)])


def _without_names(lines: list[str]) -> list[str]:
    """But for the token of the submission, and one of Python's two names in an environment."""
    kept = [line for line in lines if "--comment=" not in line]
    return [line.replace("/bin/python3 ", "/bin/python ") for line in kept]


def test_a_script_submitted_by_hand_is_found_and_not_submitted_twice(quick_sft: Any) -> None:
    shown = quick_sft.run("lockstep", "run", "--dry-run", "sft").stdout
    command = next(line for line in shown.splitlines() if "by hand" in line).split(":  ")[1]
    quick_sft.run(*command.split())
    output = quick_sft.run("dvc", "repro", "--single-item", "sft").stdout
    assert "its job still runs; waiting for it" in output or "found finished" in output
    assert quick_sft.status()["attempts"] == 1
    submitted = quick_sft.cluster.run("squeue", "-h", "--states=all", "-o", "%j %o")
    assert submitted.count(str(quick_sft.root)) == 1


def test_a_dry_run_shows_scripts_where_there_is_no_slurm(slurm_clone: Any) -> None:
    """PATH without Slurm's commands stands for a laptop."""
    environment = slurm_clone.environment
    folders = environment["PATH"].split(":")
    bare = slurm_clone.root.parent / "bin"
    bare.mkdir()
    for name in ("git", "sh", "bash", "env"):
        (bare / name).symlink_to(str(shutil.which(name)))
    assert not any((Path(folders[0]) / name).exists() for name in ("sbatch", "squeue"))
    shown = slurm_clone.run(
        "lockstep", "run", "--dry-run", PATH=f"{folders[0]}:{bare}", SLURM_CONF="/nowhere"
    ).stdout
    assert shown.count("#!/bin/bash") == 8
    assert "not yet: score@iter_001: its input" in shown
    assert "#SBATCH --array=0-1%2" in shown


def test_without_slurm_the_error_says_what_to_do(slurm_clone: Any) -> None:
    environment = slurm_clone.environment
    first = environment["PATH"].split(":")[0]
    done = slurm_clone.run("lockstep", "stage", "sft", PATH=first, check=False)
    assert done.returncode == 2
    assert "there is no sbatch on this machine" in done.stdout
    assert "make slurm-up" in done.stdout


def test_a_refusal_of_sbatch_is_passed_on(quick_sft: Any) -> None:
    quick_sft.set_profile(partition="nowhere")
    done = quick_sft.run("dvc", "repro", "--single-item", "sft", check=False)
    assert done.returncode != 0
    assert "sft: sbatch refused the job" in done.stdout
    assert "invalid partition" in done.stdout.lower()
    assert "see partition, account, qos" in done.stdout
    assert quick_sft.status()["state"] == "failed"
    quick_sft.set_profile(partition="cpu")
    assert "submitted to slurm-dev" in quick_sft.run("lockstep", "run", "--detach", "sft").stdout


def test_a_failing_set_up_line_fails_the_job_and_is_shown(slurm_clone: Any) -> None:
    slurm_clone.set_profile(setup=["echo loading modules", "no-such-command --load cuda"])
    done = slurm_clone.run("dvc", "repro", "--single-item", "sft", check=False)
    assert "no-such-command: command not found" in done.stdout
    assert "the worker never started: see `setup`" in done.stdout


def test_secrets_of_the_control_plane_do_not_travel_and_others_are_in_no_log(
    quick_sft: Any,
) -> None:
    leak, code = quick_sft.root / "leak", (quick_sft.root / "stages/sft.py").read_text()
    begin = "def run(config, inputs, out, ctx):\n"
    told = begin + "    os.system('echo mine is $MY_API_KEY')\n"
    assert begin in code
    quick_sft.write_code("stages/sft.py", code.replace(begin, told))
    quick_sft.set_profile(setup=[f"env > {leak}"])
    quick_sft.run(
        "dvc",
        "repro",
        "--single-item",
        "sft",
        MLFLOW_TRACKING_PASSWORD="hunter22",
        PREFECT_API_KEY="hunter23",
        MY_API_KEY="travels",
    )
    assert "hunter" not in leak.read_text()
    assert "MY_API_KEY=travels" in leak.read_text()
    logs = quick_sft.attempt().logs()
    assert "mine is ***" in "".join(log.read_text() for log in logs)
    assert not any(stat.S_IMODE(log.stat().st_mode) & ~0o640 for log in logs)


def test_what_a_queued_job_runs_is_the_code_as_it_was(quick_sft: Any) -> None:
    cluster = quick_sft.cluster
    for name in cluster.layout.names:
        cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")
    driver = quick_sft.start_sft()
    quick_sft.until_state("queued")
    code = quick_sft.root / "stages/sft.py"
    original = code.read_text()
    code.write_text("raise SystemExit('the code of another day')\n" + original)
    cluster.up()
    output = failed(driver)
    assert "its code, params or inputs changed while its job ran" in output
    assert "another day" not in quick_sft.run("lockstep", "logs", "sft").stdout
    code.write_text(original)
    output = quick_sft.run("dvc", "repro", "--single-item", "sft").stdout
    assert "found finished; publishing" in output
    assert quick_sft.attempt().launched.git_commit


def test_uncommitted_changes_are_recorded_with_the_attempt(quick_sft: Any) -> None:
    code = quick_sft.root / "stages/sft.py"
    code.write_text(code.read_text() + "\n# not committed\n")
    quick_sft.run("dvc", "repro", "--single-item", "sft")
    launch = quick_sft.attempt().launched
    assert launch.git_commit.endswith("+")
    assert "+# not committed" in launch.git_diff


def test_a_dry_run_for_slurm_leaves_other_profiles_alone(quick_sft: Any) -> None:
    quick_sft.run("lockstep", "run", "--dry-run", "sft")
    only_python = quick_sft.environment["PATH"].split(":")[0]
    path = f"{only_python}:/usr/bin:/bin"
    output = quick_sft.run("dvc", "repro", "-s", "sft", LOCKSTEP_PROFILE="local", PATH=path)
    assert "submitted to local" in output.stdout


def test_inside_an_allocation_a_local_job_is_one_process(quick_sft: Any) -> None:
    """Slurm's variables of somebody's interactive job must not be taken for the stage's own."""
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    variables |= {"SLURM_JOB_ID": "99", "LOCKSTEP_PROFILE": "local"}
    quick_sft.run("dvc", "repro", "--single-item", "sft", **variables)


def test_a_job_that_comes_back_after_its_cancellation_does_nothing(long_sft: Any) -> None:
    driver, row = long_sft.start_training(*STAGE)
    long_sft.run("lockstep", "cancel", "sft")
    ended(driver)
    steps = long_sft.steps()
    long_sft.until(lambda: not long_sft.jobs(), "its end")
    long_sft.cluster.run("scontrol", "requeue", row["job"])
    long_sft.until(lambda: long_sft.attempt().restarts == 1, "a restart")
    long_sft.until(lambda: not long_sft.jobs(), "its end")
    assert long_sft.steps() == steps
    assert long_sft.status()["state"] == "cancelled"


@pytest.mark.parametrize("where", ["variable", "profile"])
def test_the_job_runs_its_copy_of_the_code_whatever_sbatch_hands_on(
    quick_sft: Any, where: str
) -> None:
    noted = quick_sft.root / "noted"
    look = "    import json, os, pipelines\n    from pathlib import Path\n"
    look += f"    Path({str(noted)!r}).write_text(json.dumps([pipelines.__file__, *os.environ]))\n"
    quick_sft.begin_with("sft", look)
    if where == "profile":
        quick_sft.set_profile(sft={"extra": {"export": "NONE"}})
    given = {"SBATCH_EXPORT": "NONE"} if where == "variable" else {}
    quick_sft.run("dvc", "repro", "--single-item", "sft", **given)
    module, *variables = json.loads(noted.read_text())
    assert f"{quick_sft.root}/.lockstep/code/" in module
    assert {"PYTHONSAFEPATH", "OMP_NUM_THREADS"} <= set(variables)


def test_the_profile_counts_and_not_what_the_user_has_set_for_sbatch(quick_sft: Any) -> None:
    """But where the profile says nothing, it is the user's to say."""
    quick_sft.set_profile(partition="cpu")
    variables = {"PARTITION": "nowhere", "TIMELIMIT": "1", "JOB_NAME": "mine"}
    variables |= {"OUTPUT": str(quick_sft.root / "elsewhere"), "NO_REQUEUE": "1"}
    given = {f"SBATCH_{name}": value for name, value in variables.items()}
    quick_sft.run("dvc", "repro", "--single-item", "sft", **given, SBATCH_COMMENT="mine")
    assert not (quick_sft.root / "elsewhere").exists()
    words = ["squeue", "-h", "--states=all", "-o", "%P %j %l", "-j", quick_sft.status()["job"]]
    partition, name, limit = quick_sft.cluster.run(*words).split()
    assert (partition, name) == ("cpu", "lockstep-sft")
    assert limit != "1:00"
    quick_sft.set_profile(partition=None)
    quick_sft.set_params(seed=18)
    done = quick_sft.run("dvc", "repro", "-s", "sft", check=False, SBATCH_PARTITION="nowhere")
    assert "invalid partition" in done.stdout.lower()


def test_the_cluster_that_a_user_has_chosen_is_meant_for_sbatch_too(quick_sft: Any) -> None:
    done = quick_sft.run("dvc", "repro", "-s", "sft", check=False, SLURM_CLUSTERS="elsewhere")
    assert "sbatch: error: 'elsewhere' can't be reached" in done.stdout
    assert "submitted" not in done.stdout, "to the cluster that happens to be here"


def test_another_job_that_a_sites_sbatch_speaks_of_is_left_alone(long_sft: Any) -> None:
    cluster, folder = long_sft.cluster, long_sft.root.parent / "site"
    bystander = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap=sleep 600").strip()
    folder.mkdir()
    wrapper = folder / "sbatch"
    wrapper.write_text(
        f"#!/bin/sh\necho 'your last job {bystander} used 3 % of its memory'\necho {bystander}\n"
        f'{shutil.which("sbatch")} "$@"\nstatus=$?\necho "see the manual"\nexit $status\n'
    )
    wrapper.chmod(0o755)
    path = f"{folder}:{long_sft.environment['PATH']}"
    driver = long_sft.start("dvc", "repro", "--single-item", "sft", PATH=path)
    assert long_sft.training()["job"] != bystander
    long_sft.run("lockstep", "cancel", "sft")
    ended(driver)
    assert long_sft.jobs() == [bystander]


def test_a_job_that_is_not_ours_is_never_cancelled(long_sft: Any) -> None:
    """Whatever the ledger says: Slurm gives numbers again after it has lost its state."""
    bystander = long_sft.cluster.run(
        "sbatch", "--parsable", "-o", "/dev/null", "--wrap=sleep 600"
    ).strip()
    driver, row = long_sft.start_training(*STAGE)
    attempt = long_sft.attempt()
    attempt.write(replace(attempt.launched, jobs=(row["job"], bystander)))
    long_sft.run("lockstep", "cancel", "sft")
    ended(driver)
    long_sft.until(lambda: long_sft.jobs() == [bystander], "its own job ends, and no other")
