"""`--host`: the files of a clone reach another one over a real ssh, and nothing there is lost."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock
from pipelines.host.address import Host, parse_host
from pipelines.host.reconcile import after_a_run, reconcile
from pipelines.host.send import send
from pipelines.host.ssh import connect
from tests.conftest import Clone
from tests.sshd import NAME, Sshd, serving
from tests.waiting import TIMEOUT_S, answers, succeeded, until_said


@pytest.fixture(scope="module")
def sshd() -> Iterator[Sshd]:
    with serving({}) as sshd:
        yield sshd


@dataclass(frozen=True)
class Pair:
    here: Clone
    there: Path
    """An empty repository, at a path that a shell would take apart."""

    def run(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.here.run("lockstep", *words, "--host", f"{NAME}:{self.there}", check=check)

    def refused(self, *words: str) -> str:
        done = self.run(*words, check=False)
        assert done.returncode == 2, done.stdout
        return done.stdout

    def send(self) -> str:
        """What `lockstep plan` does first; what it says."""
        said: list[str] = []
        connection = connect(Host(NAME, str(self.there)))
        send(connection, self.here.root, said.append)
        return "\n".join(said)

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.there, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def pair(clone: Clone, sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    there = tmp_path / "the 'cluster' $(touch x)"
    subprocess.run(["git", "init", "-q", str(there)], check=True)
    clone.without_tracking()
    clone.variables |= sshd.variables
    for name, value in sshd.variables.items():
        monkeypatch.setenv(name, value)
    clone.run("git", "config", "lockstep.hostPython", sys.executable)
    return Pair(clone, there)


def test_what_runs_there_is_what_lies_here(pair: Pair) -> None:
    here, there = pair.here.root, pair.there
    strange = "data/-rf $HOME; 'a\"\\ü\n.jsonl"
    (here / strange).write_text("x")
    (here / "README.md").unlink()
    (here / "presets").chmod(0o755)
    pair.here.set_params(sft__learning_rate=0.5)
    said = pair.run("plan", "sft", "-S", "sft.epochs=7", "--json").stdout
    planned = json.loads(said[said.index("\n[\n") :])
    assert [stage["address"] for stage in planned] == ["code", "prepare", "sft"]
    assert planned[-1]["reasons"]
    status = ("status", "--porcelain", "-z")
    assert pair.git(*status) == pair.here.run("git", *status).stdout
    assert pair.git("rev-parse", "HEAD") == pair.here.run("git", "rev-parse", "HEAD").stdout
    assert (there / strange).read_text() == "x"
    assert pair.send() == ""
    # A file that is gone here goes there, too.
    (here / strange).unlink()
    pair.send()
    assert not (there / strange).exists()
    assert not (there.parent / "x").exists()
    assert not (Path.home() / "x").exists()


def test_changes_there_are_refused_by_name_until_they_are_settled(pair: Pair) -> None:
    pair.send()
    (pair.there / "params.yaml").write_text("theirs")
    (pair.there / "notes.txt").write_text("only there")
    pair.here.set_params(sft__learning_rate=0.5)
    with pytest.raises(LockstepError, match=r"somebody changed params\.yaml there"):
        pair.send()
    assert (pair.there / "params.yaml").read_text() == "theirs"
    # As the error says: here, or no longer there.
    pair.here.run("git", "show", "refs/lockstep/there:params.yaml")
    pair.git("checkout", "refs/lockstep/base", "--", "params.yaml")
    assert "only there, and left as they are: notes.txt" in pair.send()
    assert (pair.there / "notes.txt").read_text() == "only there"
    here, there = (root / "params.yaml" for root in (pair.here.root, pair.there))
    assert here.read_bytes() == there.read_bytes()


def test_commits_there_that_nobody_has_here_are_not_left_behind(pair: Pair) -> None:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    pair.git(*identity, "commit", "-q", "--allow-empty", "-m", "theirs")
    commit = pair.git("rev-parse", "HEAD")[:12]
    with pytest.raises(LockstepError, match=f"is at commit {commit}, which this clone does not"):
        pair.send()
    assert not (pair.there / "params.yaml").exists()


def test_no_file_changes_under_a_pipeline_that_runs_there(pair: Pair) -> None:
    pair.send()
    before = (pair.there / "params.yaml").read_bytes()
    pair.here.set_params(sft__learning_rate=0.5)
    lock = pair.there / ".lockstep/run.lock"
    with hold_lock(lock), pytest.raises(LockstepError, match=r"under it: params.yaml\."):
        pair.send()
    assert (pair.there / "params.yaml").read_bytes() == before


def test_what_is_missing_there_is_named_with_what_to_do(pair: Pair, tmp_path: Path) -> None:
    pair.here.run("git", "config", "--unset", "lockstep.hostPython")
    said = pair.refused("plan")
    assert "there is no .venv/bin/python in" in said
    assert "make venv" in said
    assert (pair.there / "Makefile").exists(), "it needs the files"
    away = Pair(pair.here, tmp_path / "nowhere")
    assert "there is no folder" in away.refused("plan")
    assert "git init" in away.refused("status")
    nobody = pair.here.run("lockstep", "status", check=False, LOCKSTEP_HOST="-oProxyCommand=x")
    assert nobody.returncode == 2
    assert "LOCKSTEP_HOST: '-oProxyCommand=x' is no host" in nobody.stdout


def test_the_pages_there_open_here_until_ctrl_c(pair: Pair, sshd: Sshd) -> None:
    pair.send()
    sshd.kill_clients()  # which leaves a socket behind that nobody listens at
    # Here and there are one machine, so the port here is another one.
    pages = pair.here.start("lockstep", "ui", "--port", "0", f"--host={NAME}:{pair.there}")
    said = until_said(pages, "/#token=")
    link = re.search(r"http://127.0.0.1:(\d+)/#token=(\w+)", said)
    assert link, said
    port, token = int(link[1]), link[2]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/pages", headers={"X-Lockstep-Token": token}
    )
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        assert json.load(answer)["root"] == str(pair.there)
    pages.send_signal(signal.SIGINT)
    assert "the server has ended" in succeeded(pages)
    assert not answers(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("login", Host("login", "./clone")),
        ("ada@login", Host("ada@login", "./clone")),
        ("ada@login:/shared/ada/x/", Host("ada@login", "/shared/ada/x")),
        ("login:~/a b", Host("login", "./a b")),
        ("ada@[::1]:x", Host("ada@::1", "./x")),
    ],
)
def test_a_host_is_read_as_ssh_and_git_read_it(text: str, host: Host) -> None:
    assert parse_host(text, "--host", "clone") == host


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "a b:x", "login:~bob/x", "@:x", "x\n:y"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(LockstepError, match=r"^--host: "):
        parse_host(text, "--host", "clone")


A, B, C = (("100644", letter * 40) for letter in "abc")


def test_results_come_back_and_only_results() -> None:
    base = {"dvc.lock": A, "metrics/sft.json": A, "params.yaml": A}
    there = {"dvc.lock": B, "metrics/new.json": C, "params.yaml": A}
    found = reconcile(base, there, base, {})
    assert found.bring == {"dvc.lock": B, "metrics/new.json": C, "metrics/sft.json": None}
    assert not found.conflicts
    assert found.sent == {"dvc.lock": B, "metrics/new.json": C, "params.yaml": A}


def test_results_that_changed_on_both_sides_are_left_to_the_user() -> None:
    base, here, there = {"dvc.lock": A}, {"dvc.lock": B}, {"dvc.lock": C}
    assert reconcile(here, there, base, {}).conflicts == ("dvc.lock",)
    found, settled = after_a_run(here, there, base)
    assert (found.bring, found.conflicts, settled) == ({}, ("dvc.lock",), base)


def test_files_of_a_command_that_was_killed_on_its_way_are_nobody_elses() -> None:
    base, under_way, here = {"params.yaml": A}, {"params.yaml": B}, {"params.yaml": C}
    assert reconcile(here, under_way, base, under_way).sent == here
