"""`lockstep profile init` as it is typed, where Slurm's commands answer as they were recorded.

The commands are stand-ins that know the questions that are asked, word for word; tests/slurm asks
clusters that are really there.
"""

import builtins
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.commands.cli import main
from pipelines.config.profiles import load_profile
from pipelines.survey.parsing import ASSOCIATION_COLUMNS, QOS_COLUMNS
from tests.control.recorded_clusters import RELEASES, recorded

SHOW = "sacctmgr --noheader --parsable2 show"


SAID = recorded(RELEASES[-1])
ANSWERS = {
    "scontrol show config": SAID["config"],
    "scontrol show partition --oneliner": SAID["partitions"],
    "scontrol show node --oneliner": SAID["nodes"],
    f"{SHOW} user ada format=DefaultAccount": SAID["user ada"],
    f"{SHOW} assoc user=ada cluster=orion format={','.join(ASSOCIATION_COLUMNS)}": (
        SAID["assoc ada"]
    ),
    f"{SHOW} qos format={','.join(QOS_COLUMNS)}": SAID["qos"],
    # These two are doctor's.
    f"{SHOW.replace('show', 'show assoc')} user=ada format=Account,QOS": (
        "llm|long,normal\nphysics|normal,scavenger\n"
    ),
    "sinfo --noheader --format %P|%l": (
        "batch*|7-00:00:00\naccel|2-00:00:00\nscavenge|1-00:00:00\n"
    ),
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for a clone, and no Slurm."""
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LOGNAME", "ada")
    return tmp_path


@pytest.fixture
def orion(clone: Path) -> Path:
    have_slurm(clone, ANSWERS)
    return clone


def have_slurm(clone: Path, known: dict[str, str], *, refuses: str = "") -> None:
    """Stand-ins that answer what is known, and complain of any other question."""
    cases = ""
    for number, (question, answer) in enumerate(known.items()):
        (clone / f"answer{number}").write_text(answer)
        cases += f"{shlex.quote(question)}) exec /bin/cat {clone}/answer{number} ;;\n"
    end = f"echo {refuses} >&2; exit 1" if refuses else "exit 0"
    program = f"""#!/bin/sh
case "${{0##*/}} $*" in
"sbatch --test-only") {end} ;;
{cases}esac
echo "unexpected: $0 $*" >&2
exit 1
"""
    for name in ("scontrol", "sacctmgr", "sinfo", "sbatch"):
        path = clone / "bin" / name
        path.write_text(program)
        path.chmod(0o755)


def typed(*words: str) -> int:
    return main(["profile", "init", *words])


def test_the_profile_is_written_and_doctor_is_asked(orion: Path, capsys: Any) -> None:
    assert typed() == 0
    said = capsys.readouterr().out
    assert "slurm_profiles/orion.yaml: One nvidia_h100_80gb_hbm3 of accel" in said
    assert "account llm: your default account; you also have physics" in said
    assert "sft, " in said
    assert "Slurm would take them" in said
    profile = load_profile(orion, "orion")
    assert (profile.defaults.account, profile.defaults.constraint) == ("llm", "h100")


def test_what_sbatch_refuses_is_the_commands_failure(orion: Path, capsys: Any) -> None:
    have_slurm(orion, ANSWERS, refuses="too much")
    assert typed("mine") == 1
    assert "too much" in capsys.readouterr().out
    assert (orion / "slurm_profiles/mine.yaml").exists()


def test_it_can_be_printed_for_people_and_for_programs(orion: Path, capsys: Any) -> None:
    assert typed("--stdout", "--qos", "long") == 0
    text = capsys.readouterr().out
    assert "qos: long  # as you asked" in text
    assert not (orion / "slurm_profiles").exists()
    assert typed("--json", "--qos", "long") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["path"] == "slurm_profiles/orion.yaml"
    assert (orion / values["path"]).read_text() == text
    assert {"key": "qos", "value": "long", "why": "as you asked", "advice": False} in values[
        "defaults"
    ]
    assert all(check["fine"] for check in values["checks"])


def test_a_file_that_exists_stays_as_it_is(orion: Path, capsys: Any) -> None:
    (orion / "slurm_profiles").mkdir()
    path = orion / "slurm_profiles/orion.yaml"
    path.write_text("mine\n")
    assert typed() == 2
    assert "slurm_profiles/orion.yaml exists" in capsys.readouterr().err
    assert path.read_text() == "mine\n"
    assert typed("../orion") == 2
    assert "'../orion' is no name of a profile" in capsys.readouterr().err
    assert typed("--force") == 0
    assert "executor: slurm" in path.read_text()


def test_without_slurm_it_says_where_to_go(clone: Path, capsys: Any) -> None:
    assert typed() == 2
    assert "no `scontrol` on PATH" in capsys.readouterr().err
    assert not (clone / "slurm_profiles").exists()


def test_accounting_that_does_not_answer_is_told(orion: Path, capsys: Any) -> None:
    have_slurm(orion, {k: v for k, v in ANSWERS.items() if not k.startswith("sacctmgr")})
    assert typed("--stdout") == 0
    text = capsys.readouterr().out
    assert "# account: my-team  # accounting did not answer" in text
    assert "\n  qos:" not in text


def test_a_terminal_is_asked_where_two_are_as_good(
    orion: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = iter(["7", "2"])
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", lambda _: next(replies))
    assert typed() == 0
    said = capsys.readouterr().out
    assert "1  accel: 8 nvidia_h100_80gb_hbm3 of 79G on 1 node;" in said
    assert "a number from 1 to 2, please" in said
    assert load_profile(orion, "orion").defaults.constraint == "a100"
    # Asked nothing, it takes the first.
    assert typed("--yes", "--force") == 0
    assert load_profile(orion, "orion").defaults.constraint == "h100"
