"""What a newcomer meets: help, doctor, logs, and commands in the wrong place."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.console import Console, describe_metrics, seconds
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.commands.cli import GROUPS, main
from pipelines.config.reference import params_reference, profiles_reference
from pipelines.doctor import checks
from pipelines.ledger.entry import Entry
from pipelines.slurm import logs
from tests.ledger_values import launch

ROOT = Path(__file__).resolve().parents[2]


def test_the_references_are_in_step_with_the_fields() -> None:
    remedy = "run `python -m pipelines.config.reference`"
    assert (ROOT / "docs/params.md").read_text() == params_reference(), remedy
    assert (ROOT / "docs/profiles.md").read_text() == profiles_reference(), remedy


COMMANDS = [name for names in GROUPS.values() for name in names]


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in overview
        assert main([command, "--help"]) == 0
        assert len(capsys.readouterr().out.splitlines()) > 3


def test_every_file_of_a_command_is_listed_once() -> None:
    files = {path.stem for path in (ROOT / "pipelines/commands").glob("*.py")}
    assert sorted(name.replace("-", "_") for name in COMMANDS) == sorted(
        files - {"__init__", "cli", "options"}
    )


def test_only_the_file_of_the_command_that_is_called_is_imported() -> None:
    program = (
        "import sys; from pipelines.commands.cli import main; main(['stage', '--help'])\n"
        "found = [name for name in sys.modules if name.startswith('pipelines.')]\n"
        "assert 'pipelines.commands.stage' in found and 'pipelines.commands.plan' not in found\n"
        "assert 'pipelines.driver' not in found and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing command"),
        (["plna"], "Did you mean 'plan'?"),
        (["plan", "--jsno"], "No such option: --jsno"),
        (["stage"], "Missing argument 'address'"),
        (["run", "--profile"], "Option '--profile' requires an argument"),
        (["scores", "a", "b", "--limit", "many"], "--limit"),
        (["run", "--detach", "--chain"], "--detach and --chain are not for one command"),
        (["samples", "--won", "--lost"], "--lost and --won are not for one command"),
        (["export", "sft", "x", "--dtype", "int8"], "'float32', 'bfloat16'"),
        (["lineage", "x", "--depth", "-1"], "--depth is a number from 0 up, not -1"),
    ],
)
def test_what_was_mistyped_is_named_with_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_an_interruption_has_the_status_that_shells_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Repository, "find", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr().err == "lockstep: interrupted\n"


def test_outside_a_repository_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "run lockstep inside a repository" in capsys.readouterr().err


def test_a_python_without_the_packages_is_told_what_to_do() -> None:
    bare = [sys.executable, "-S", "-m", "pipelines", "plan"]
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "activate the project's environment first" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_command_cannot_do_is_explained(clone: Any) -> None:
    for words, said in (
        (("stage", "stf"), "no stage is called 'stf'"),
        (("stage", "rollout@iter_9"), "rl.iterations has no 'iter_9'; it has iter_001"),
        (("stage", "sft"), "`base` at artifacts/base does not exist; run `dvc repro`"),
        (("logs", "sft"), "no job of 'sft' is known here"),
    ):
        done = clone.run("lockstep", *words, check=False)
        assert done.returncode == 2, words
        assert said in done.stdout


def test_doctor_is_content_here_and_names_what_is_wrong(clone: Any) -> None:
    findings = json.loads(clone.run("lockstep", "doctor", "--json").stdout)
    assert all(finding["fine"] for finding in findings)
    (clone.root / "params.yaml").write_text("sede: 1\n")
    done = clone.run("lockstep", "doctor", check=False, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "BAD  params.yaml" in done.stdout
    assert "BAD  mlflow server" in done.stdout
    assert "-> start it, or unset MLFLOW_TRACKING_URI" in done.stdout


def test_doctor_shows_no_error_that_is_none_of_this_profile(clone: Any) -> None:
    """A machine with Slurm's commands and without its cluster."""
    folder = clone.root / "bin"
    folder.mkdir()
    for name in ("sbatch", "sinfo"):
        (folder / name).write_text("#!/bin/sh\necho 'sinfo: fatal: no configuration' >&2\nexit 1\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{clone.environment['PATH']}"
    said = clone.run("lockstep", "doctor", check=False, PATH=path).stdout
    assert "Slurm does not answer here, and the profile needs none" in said
    assert "fatal" not in said
    said = clone.run("lockstep", "doctor", check=False, PATH=path, LOCKSTEP_PROFILE="slurm").stdout
    assert "BAD  slurm" in said
    assert "sinfo: fatal: no configuration" in said


def test_the_name_of_a_log_is_written_once_also_while_it_is_empty(entry: Entry) -> None:
    attempt = entry.new_attempt(launch())
    log = attempt.folder / "job_0_log.out"
    log.touch()
    written: dict[str, int] = {}
    said: list[str] = []
    for text in ("", "", "first\n", "second\n"):
        log.write_text(log.read_text() + text)
        logs._write_new(attempt, written, said.append)
    assert "".join(said) == "==> attempt 001, job_0_log.out\nfirst\nsecond\n"


def test_doctor_prints_no_password(clone: Any) -> None:
    address = "http://somebody:pa55word@127.0.0.1"
    done = clone.run("lockstep", "doctor", check=False, MLFLOW_TRACKING_URI=address)
    assert "BAD  mlflow server" in done.stdout
    assert "pa55word" not in done.stdout


def test_dry_run_of_a_stage_prints_a_script_that_can_be_submitted(clone: Any) -> None:
    script = clone.run("lockstep", "stage", "sft", "--profile", "slurm", "--dry-run").stdout
    assert script.startswith("#!/bin/bash")
    assert "#SBATCH --job-name=lockstep-sft" in script


def test_without_slurm_a_slurm_profile_says_what_to_do(clone: Any) -> None:
    only_python = clone.environment["PATH"].split(":")[0]
    words = ("lockstep", "stage", "prepare", "--profile", "slurm")
    done = clone.run(*words, check=False, PATH=only_python)
    assert done.returncode == 2
    assert "there is no sbatch on this machine" in done.stdout
    assert "`--dry-run` shows the job scripts anywhere" in done.stdout


def test_experiments_in_a_folder_of_their_own_share_the_outer_clones_state(tmp_path: Path) -> None:
    inner = tmp_path / ".dvc/tmp/exps/standalone/x"
    inner.mkdir(parents=True)
    for name in ("dvc.yaml", "params.yaml"):
        (inner / name).write_text("")
    assert Repository.find(inner).shared_home == tmp_path / ".lockstep"
    assert Repository.find(inner).home == inner / ".lockstep"
    with pytest.raises(LockstepError):
        Repository.find(tmp_path)


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.progress("1/2")
    console.line("done")
    assert capsys.readouterr().out == "done\n"


def test_a_stages_numbers_have_their_errors_beside_them() -> None:
    metrics = {"reward_mean": 0.71234, "reward_mean_error": 0.02345, "entropy": 1.5, "other": 3.0}
    assert describe_metrics(metrics) == "reward_mean 0.7123 ± 0.023  entropy 1.5"
    same = {"kl_to_reference": 1.97e-10, "kl_to_reference_error": 1.2e-9}
    assert describe_metrics(same) == "kl_to_reference 0"


@pytest.mark.parametrize(
    ("value", "text"), [(3.21, "3.2 s"), (42, "42 s"), (75, "1 min 15 s"), (7260, "2 h 01 min")]
)
def test_durations_as_people_say_them(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("profile", "devices", "expected"),
    [
        ("local", [], []),
        ("local", ["nvidia0"], [(True, "there is one, and the profile 'local' leaves it alone")]),
        ("gpu", ["nvidia0"], [(True, "there is one")]),
        ("gpu", [], [(False, "none here, and the profile 'gpu' computes on one")]),
        ("slurm", ["nvidia0"], []),
    ],
)
def test_the_doctor_compares_the_profile_with_the_gpus_that_are_here(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    profile: str,
    devices: list[str],
    expected: list[tuple[bool, str]],
) -> None:
    """With devices that are plain files, in a folder that stands in for /dev."""
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    monkeypatch.setenv("LOCKSTEP_PROFILE", profile)
    found = list(checks._gpu(Repository(ROOT)))
    assert [(finding.fine, finding.detail.partition(":")[0]) for finding in found] == expected
