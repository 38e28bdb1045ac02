"""`--host`: the files of a clone reach another one over a real ssh, and nothing there is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.locks import hold_lock
from pipelines.base.repository import Repository
from pipelines.host.address import Host, chosen_host, parse_host
from pipelines.host.kept import KeptRun, latest
from pipelines.host.reconcile import after_a_run, reconcile
from pipelines.host.send import send
from pipelines.host.ssh import connect
from pipelines.host.there import follow
from pipelines.host.trees import LARGE
from tests.conftest import Clone
from tests.sshd import NAME, Sshd, serving
from tests.waiting import TIMEOUT_S, answers, succeeded, until_said

IDENTITY = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")


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


@pytest.fixture
def files(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Of a clone what its way to a host looks at: files in git."""
    for name, value in sshd.variables.items():
        monkeypatch.setenv(name, value)
    here, there = Clone(tmp_path / "here"), tmp_path / "there"
    for root in (here.root, there):
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    here.variables |= sshd.variables
    for name in ("params.yaml", "dvc.yaml"):
        (here.root / name).write_text("a: 1")
    here.run("git", "add", ".")
    here.run("git", *IDENTITY, "commit", "-q", "-m", "files")
    return Pair(here, there)


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


def test_changes_there_are_refused_by_name_until_they_are_settled(files: Pair) -> None:
    files.send()
    (files.there / "params.yaml").write_text("theirs")
    (files.there / "notes.txt").write_text("only there")
    (files.here.root / "params.yaml").write_text("a: 2")
    with pytest.raises(LockstepError, match=r"somebody changed params\.yaml there"):
        files.send()
    assert (files.there / "params.yaml").read_text() == "theirs"
    # As the error says: here, or no longer there.
    files.here.run("git", "show", "refs/lockstep/there:params.yaml")
    files.git("checkout", "refs/lockstep/base", "--", "params.yaml")
    assert "only there, and left as they are: notes.txt" in files.send()
    assert (files.there / "notes.txt").read_text() == "only there"
    here, there = (root / "params.yaml" for root in (files.here.root, files.there))
    assert here.read_bytes() == there.read_bytes()


def test_commits_there_that_nobody_has_here_are_not_left_behind(files: Pair) -> None:
    files.git(*IDENTITY, "commit", "-q", "--allow-empty", "-m", "theirs")
    commit = files.git("rev-parse", "HEAD")[:12]
    with pytest.raises(LockstepError, match=f"is at commit {commit}, which this clone does not"):
        files.send()
    assert not (files.there / "params.yaml").exists()
    files.git("update-ref", "-d", "HEAD")
    files.send()
    # Nor later, though no file differs.
    files.git(*IDENTITY, "commit", "-q", "--allow-empty", "-m", "theirs again")
    with pytest.raises(LockstepError, match="which this clone does not"):
        files.send()
    assert files.git("log", "-1", "--format=%s") == "theirs again\n"


def test_what_git_ignores_there_is_not_replaced(files: Pair) -> None:
    """Git itself would; here it is not ignored."""
    (files.there / ".git/info/exclude").write_text("notes.txt")  # its last line has no end
    files.send()
    (files.there / "notes.txt").write_text("theirs")
    (files.here.root / "notes.txt").write_text("ours")
    with pytest.raises(LockstepError, match=r"git ignores there.*\nnotes\.txt$"):
        files.send()
    assert (files.there / "notes.txt").read_text() == "theirs"


def test_what_does_not_go_through_git_is_named(files: Pair) -> None:
    nested = files.here.root / "nested"
    subprocess.run(["git", "init", "-q", str(nested)], check=True)
    files.here.run("git", "-C", "nested", *IDENTITY, "commit", "-q", "--allow-empty", "-m", "one")
    assert "repositories within this one are not sent: nested" in files.send()
    for root in (files.there, files.here.root):
        core = root / "-core.1"
        with core.open("wb") as file:
            file.truncate(LARGE + 1)
        with pytest.raises(LockstepError, match=r"(?s)-core\.1.*larger than 100 MB"):
            files.send()
        core.unlink()


def test_a_run_begins_with_the_files_that_were_brought_for_it(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another laptop may have brought its own in between."""
    monkeypatch.chdir(clone.root)
    with pytest.raises(LockstepError, match="other files were brought there meanwhile"):
        follow(["run"], {}, columns=0, files="0" * 40)
    assert latest(Repository.find()) is None


def test_a_signal_reaches_no_process_of_another_login_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One name may lead to several; a machine with two of them cannot be had."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *words: killed.append(words))
    run = KeptRun(tmp_path)
    with hold_lock(run.folder / "alive"):
        for host in ("login2", atomic.here()):
            atomic.write_json(run.folder / "process.json", {"pid": 7, "host": host})
            run.send(signal.SIGINT)
    assert killed == [(7, signal.SIGINT)]
    assert "the run lives on login2" in capsys.readouterr().err


def test_no_file_changes_under_a_pipeline_that_runs_there(
    files: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.host.send.LOCK_WAIT_S", 0.1)
    files.send()
    before = (files.there / "params.yaml").read_bytes()
    (files.here.root / "params.yaml").write_text("a: 2")
    # The second: of a run that was started, and has not yet come to take the first.
    for lock in ("run.lock", "host/1-1/alive"):
        held = hold_lock(files.there / ".lockstep" / lock)
        with held, pytest.raises(LockstepError, match=r"under it: params.yaml\."):
            files.send()
    assert (files.there / "params.yaml").read_bytes() == before


def test_what_is_missing_there_is_named_with_what_to_do(
    files: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = files.refused("plan")
    assert "there is no .venv/bin/python in" in said
    assert "make venv" in said
    assert (files.there / "params.yaml").exists(), "it needs the files"
    away = Pair(files.here, tmp_path / "nowhere")
    with pytest.raises(LockstepError, match=r"there is no folder .*git init"):
        away.send()
    monkeypatch.setenv("LOCKSTEP_HOST", "-oProxyCommand=x")
    with pytest.raises(LockstepError, match="LOCKSTEP_HOST: '-oProxyCommand=x' is no host"):
        chosen_host(None, files.here.root)


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


@pytest.mark.parametrize(
    "text",
    ["-oProxyCommand=x", "[-oP=x]:y", "a@-oP=x", "a b:x", "login:~bob/x", "@:x", "x\n:y"],
)
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
