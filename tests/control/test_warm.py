"""Processes that are ready: what a forked one has of its own, and when a server ends.

The servers here import nothing heavy, and fork small programs of this file; that stages and DVC run
in such processes as in others is in tests/pipeline.
"""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.base.locks import is_locked
from pipelines.base.repository import Repository
from pipelines.warm import client, stage, wire
from pipelines.warm.child import Request
from pipelines.warm.client import Forked, end_servers, fork, prepare
from pipelines.warm.identity import Identity, Kind, is_switched_off
from tests.waiting import TIMEOUT_S, until

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = """
import json, os, random, resource, signal, sys, time
from pathlib import Path
import pipelines.warm.server as server

def describe(arguments, files):
    print("to its log", flush=True)
    Path(arguments[0]).write_text(json.dumps({
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "folder": os.getcwd(),
        "variables": dict(os.environ), "umask": os.umask(0), "nice": os.nice(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE), "drawn": random.random(),
        "cores": sorted(os.sched_getaffinity(0)), "argv": sys.argv,
        "open": [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{n}")],
    }))
    return 7

def sleep(arguments, files):
    time.sleep(600)
    return 0

def stubborn(arguments, files):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def speak(arguments, files):
    sys.stdout.reconfigure(errors="backslashreplace")  # as every command does
    sys.stderr.reconfigure(errors="backslashreplace")
    print("said:", sys.stdin.read(), flush=True)
    return 0

server._MODULES |= {
    "describe": describe, "sleep": sleep, "stubborn": stubborn, "speak": speak
}
server.preload = lambda kind: None
server.GRACE_S = 5.0
server.REQUEST_S = 900.0
server.PROBED_S = 10.0
if __name__ == "__main__":
    sys.exit(server.main(Path(sys.argv[1]), server.Kind(sys.argv[2])))
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A clone whose servers know a few small programs instead of stages."""
    monkeypatch.setattr(client, "SERVER", "small_server")
    monkeypatch.setattr(client, "ANSWER_S", TIMEOUT_S)
    found = Repository(tmp_path / "clone")
    found.home.mkdir(parents=True)
    write_code(found, PROGRAMS)
    yield found
    end_servers(found)


def write_code(repository: Repository, programs: str) -> None:
    """The clone's code as it is from now on: ours, and the small programs."""
    version = hashlib.sha256(programs.encode()).hexdigest()
    code = repository.home / "code" / version
    code.mkdir(parents=True)
    for name in ("pipelines", "stages"):
        (code / name).symlink_to(ROOT / name)
    (code / "small_server.py").write_text(programs)
    (repository.root / "version").write_text(version)


def identity_of(repository: Repository, **variables: str) -> Identity:
    code = repository.home / "code" / (repository.root / "version").read_text()
    return Identity(Kind.COMPUTE, (sys.executable,), code, {**os.environ, **variables})


def ask(
    repository: Repository,
    module: str,
    *arguments: str,
    minutes: float | None = None,
    hasty: bool = False,
    **variables: str,
) -> Forked:
    """A `hasty` server may have ended before it is asked: then the next one is."""
    request = Request.from_here(
        module, list(arguments), {**os.environ, **variables}, str(repository.root), minutes
    )
    with (repository.root / "log").open("ab") as log:
        files = [log.fileno()] * 3
        identity = identity_of(repository)
        forked = fork(repository, identity, request, files, waits=True)
        if forked is None and hasty:
            again = lambda: fork(repository, identity, request, files, waits=True)  # noqa: E731
            forked = until(again, "a server forks it")
    assert forked is not None
    return forked


def described(repository: Repository, *, hasty: bool = False, **variables: str) -> dict[str, Any]:
    path = repository.root / "said.json"
    assert ask(repository, "describe", str(path), hasty=hasty, **variables).wait() == 7
    return dict(json.loads(path.read_text()))


def servers(repository: Repository) -> list[Path]:
    folders = (repository.home / "warm").glob("*-*")
    return sorted(folder for folder in folders if is_locked(folder / "alive"))


def test_a_forked_process_has_all_that_a_child_of_the_command_would_have(
    repository: Repository,
) -> None:
    described(repository)  # now the server is there, with what it was started with
    before = os.umask(0o027), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1][1]))
        child = described(repository, SOME="thing", TZ="Pacific/Kiritimati")
    finally:
        os.umask(before[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, before[1])
    assert child["variables"]["SOME"] == "thing"
    assert child["umask"] == 0o027
    assert child["files"] == [200, before[1][1]]
    assert child["nice"] == os.nice(0)
    assert child["cores"] == sorted(os.sched_getaffinity(0))
    assert Path(child["folder"]) == repository.root
    assert child["session"] == child["pid"], "a session of its own: no Ctrl-C reaches it"
    assert child["argv"][0] == "describe"
    assert "to its log" in (repository.root / "log").read_text()


def test_a_forked_process_speaks_through_pipes_as_through_files(repository: Repository) -> None:
    """Its server was started with a log, which it has written to."""
    (given, giving), (reading, said) = os.pipe(), os.pipe()
    request = Request.from_here("speak", [], dict(os.environ), str(repository.root))
    forked = fork(repository, identity_of(repository), request, [given, said, said], waits=True)
    for file in (given, said):
        os.close(file)
    with os.fdopen(giving, "w") as words:
        words.write("a word")
    with os.fdopen(reading) as output:
        text = output.read()
    assert forked is not None
    assert (forked.wait(), text) == (0, "said: a word\n")


def test_a_child_holds_nothing_of_the_server_and_draws_its_own_random_numbers(
    repository: Repository,
) -> None:
    one, other = described(repository), described(repository)
    assert one["drawn"] != other["drawn"]
    assert one["pid"] != other["pid"]
    assert not [name for name in one["open"] if "alive" in name or "socket" in name]


def test_ps_shows_what_a_forked_process_does(repository: Repository) -> None:
    forked = ask(repository, "sleep", "a", "b c")
    process = psutil.Process(forked.pid)
    until(lambda: " ".join(process.cmdline()).endswith("-m sleep a b c"), "its own words")
    forked.kill()
    assert forked.wait() == -signal.SIGKILL


def test_a_process_whose_time_is_over_is_told_so_and_then_ended(repository: Repository) -> None:
    assert ask(repository, "sleep", minutes=0.01).wait() == -signal.SIGTERM
    # By then it heeds no signal.
    assert ask(repository, "stubborn", minutes=0.05).wait() == -signal.SIGKILL


def test_killed_the_server_takes_nothing_with_it_and_the_next_command_starts_another(
    repository: Repository,
) -> None:
    forked = ask(repository, "sleep")
    server = psutil.Process(forked.pid).parent()
    assert server is not None
    server.kill()
    until(lambda: not servers(repository), "the server is gone")
    assert psutil.Process(forked.pid).is_running()
    assert forked.poll() is None
    described(repository)
    os.kill(forked.pid, signal.SIGKILL)
    assert forked.wait() == 1, "how it ended, nobody knows"


def test_one_server_serves_until_code_or_settings_change_and_their_number_is_bounded(
    repository: Repository,
) -> None:
    described(repository)
    first = servers(repository)
    described(repository, LOCKSTEP_INVOCATION="x", DVC_STAGE="sft", PWD="/")
    assert servers(repository) == first
    write_code(repository, PROGRAMS + "# changed")
    described(repository)
    assert len(servers(repository)) == 2
    write_code(repository, PROGRAMS + "# changed again")
    described(repository)
    until(lambda: len(servers(repository)) == 2, "the oldest makes room")
    assert first[0] not in servers(repository)


def test_identity_is_code_interpreter_and_what_libraries_read_when_they_are_imported(
    repository: Repository,
) -> None:
    one = identity_of(repository)
    assert one.name == identity_of(repository, DVC_STAGE="sft", MLFLOW_TRACKING_URI="x").name
    # An activated environment exports its prompt, and the shell that DVC runs stages in drops it.
    assert one.name == identity_of(repository, PS1="(another) ").name
    assert one.name != identity_of(repository, OMP_NUM_THREADS="7").name
    assert one.name != identity_of(repository, HF_HOME="/elsewhere").name
    assert one.name != replace(one, python=("/other/python",)).name
    assert one.name != replace(one, code=Path("/other")).name
    assert one.name != replace(one, kind=Kind.CONTROL).name


def test_a_command_in_another_container_has_a_server_of_its_own(repository: Repository) -> None:
    private = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*private, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system allows no mount namespace")
    program = "from tests.control.test_warm import *; import sys\n"
    program += "print(identity_of(Repository(Path(sys.argv[1]))).name)"
    words = [sys.executable, "-c", program, str(repository.root)]

    def name(*before: str) -> str:
        done = subprocess.run(
            [*before, *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert name() == name()
    assert name() != name(*private)


def test_what_is_printed_while_it_imports_is_redacted(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak = "server.preload = lambda kind: print('leak', os.environ['SOME_TOKEN'])\n"
    write_code(repository, PROGRAMS.replace("server.preload = lambda kind: None\n", leak))
    monkeypatch.setenv("SOME_TOKEN", "very secret indeed")
    described(repository)
    assert "leak ***" in (servers(repository)[0] / "log").read_text()


def test_it_ends_when_idle_when_told_and_with_its_clone(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(repository)
    assert end_servers(repository)
    until(lambda: not servers(repository), "it ends when told")
    described(repository)
    (repository.home / "warm").rename(repository.root / "elsewhere")
    moved = repository.root / "elsewhere"
    until(lambda: not any(is_locked(path) for path in moved.glob("*/alive")), "its folder is gone")
    monkeypatch.setenv("LOCKSTEP_WARM_IDLE_S", "0.2")
    described(repository, hasty=True)
    until(lambda: not servers(repository), "it ends when idle")


def test_told_to_end_it_still_tells_how_its_children_ended(repository: Repository) -> None:
    forked = ask(repository, "sleep")
    end_servers(repository)
    until(lambda: not servers(repository), "nobody finds it any more")
    assert forked.poll() is None
    described(repository)  # by another
    os.kill(forked.pid, signal.SIGTERM)
    assert forked.wait() == -signal.SIGTERM


def test_it_stays_while_a_child_runs_however_idle_it_is(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_WARM_IDLE_S", "0.2")
    forked = ask(repository, "sleep", hasty=True)
    time.sleep(1.5)
    assert servers(repository)
    forked.kill()
    until(lambda: not servers(repository), "it ends when idle")


def test_a_copy_of_the_clone_does_not_reach_the_server_of_the_original(
    repository: Repository, tmp_path: Path
) -> None:
    child = described(repository)
    copy = Repository(tmp_path / "copy")
    subprocess.run(["cp", "-a", repository.root, copy.root], check=True)
    (folder,) = (copy.home / "warm").iterdir()
    assert wire.address_of(folder) is None, "what the original's server said is not said here"
    # Even one that asks for the very same: it has a folder of its own, and no server lives there.
    identity, path = identity_of(repository), copy.root / "it"
    request = Request.from_here("describe", [str(path)], dict(os.environ), str(copy.root))
    forked = fork(copy, identity, request, [0, 1, 2], waits=True)
    assert forked is not None
    assert forked.wait() == 7
    assert child["parent"] != json.loads(path.read_text())["parent"]
    assert end_servers(copy)


def test_two_servers_that_start_side_by_side_leave_each_other_alone(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they import, nobody can reach them; and before that, they have not even a lock."""
    slow = "server.preload = lambda kind: time.sleep(600)\n"
    write_code(repository, PROGRAMS.replace("server.preload = lambda kind: None\n", slow))
    monkeypatch.setattr(client, "END_S", TIMEOUT_S)
    both = [identity_of(repository), identity_of(repository, OMP_NUM_THREADS="7")]
    for identity in both:
        prepare(repository, identity)
    places = repository.home / "warm"
    both_are_there = lambda: len(list(places.glob("*-*"))) == 2  # noqa: E731
    until(lambda: len(servers(repository)) == 2, "both have their locks", at_work=both_are_there)
    # Told to end, they do not go on importing for nobody.
    assert len(end_servers(repository)) == 2
    assert not servers(repository)


def test_a_server_that_has_only_just_been_started_is_told_to_end(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "END_S", TIMEOUT_S)
    prepare(repository, identity_of(repository))
    (name,) = end_servers(repository)
    assert wire.living_process(repository.home / "warm" / name) is None
    assert not servers(repository)


def test_a_forked_process_can_be_signalled_by_its_group_at_once(repository: Repository) -> None:
    for _ in range(20):
        forked = ask(repository, "sleep")
        os.killpg(forked.pid, signal.SIGKILL)
        assert forked.wait() == -signal.SIGKILL


def test_a_server_that_gets_ready_between_two_looks_is_found(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No real race hits this moment surely: the look at the lock waits for it."""
    looks = []

    def look_late(path: Path) -> bool:
        looks.append(path)
        if len(looks) > 1:
            until(lambda: wire.address_of(path.parent), "the server is ready")
        return is_locked(path)

    monkeypatch.setattr(client, "is_locked", look_late)
    assert described(repository)
    assert len(looks) > 1


def test_a_server_is_found_after_one_was_killed_that_had_said_where_it_listens(
    repository: Repository,
) -> None:
    for _ in range(5):
        os.kill(described(repository)["parent"], signal.SIGKILL)
        until(lambda: not servers(repository), "the server is gone")
    assert described(repository)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(repository: Repository) -> None:
    described(repository)
    folder = servers(repository)[0]
    name = json.loads((folder / "address").read_text())["name"]
    assert (folder.parent.stat().st_mode & 0o077) == 0, "nobody else reads the name"
    stranger = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
        f"one.connect('\\0{name}')\n"
        "try:\n"
        '    one.sendall(b\'\\0\\0\\0\\x0f{"end": "mine"}\')\n'
        "    sys.exit(one.recv(1) != b'')\n"
        "except OSError:\n"
        "    sys.exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", stranger], check=True)
    until(lambda: "another user" in (folder / "log").read_text(), "it says so in its log")
    described(repository)
    assert servers(repository) == [folder]


def test_rubbish_ends_no_server(repository: Repository) -> None:
    described(repository)
    folder = servers(repository)[0]
    for message in ({"module": "describe"}, {"waits": True, "module": 3}, {}):
        connection = wire.connect(wire.address_of(folder) or {})
        assert connection is not None
        wire.send(connection, message)
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(1) == b""
        connection.close()
    described(repository)
    assert servers(repository) == [folder]


def test_where_no_server_can_start_the_caller_is_told_at_once(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = replace(identity_of(repository), python=(sys.executable, "-c", "raise SystemExit"))
    request = Request.from_here("describe", [], {}, "/")
    assert fork(repository, identity, request, [0, 1, 2]) is None
    monkeypatch.setattr(client, "_start", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    assert fork(repository, identity, request, [0, 1, 2]) is None


def test_a_profile_that_cannot_be_read_is_left_to_the_driver_to_name(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository.root / "slurm_profiles").mkdir()
    (repository.root / "slurm_profiles/local.yaml").write_bytes(b"executor: l\xffcal\n")
    monkeypatch.setattr(stage.Repository, "find", lambda: repository)
    monkeypatch.delenv("LOCKSTEP_WARM", raising=False)
    monkeypatch.setenv("LOCKSTEP_PROFILE", "local")
    assert stage.run_forked(["stage", "sft"]) is None


def test_a_stage_with_options_is_not_forked(tmp_path: Path) -> None:
    """They may name a profile whose stages run under a debugger."""
    program = (
        "import runpy, sys; import pipelines.warm.stage as stage\n"
        "stage.run_forked = lambda words: 42\n"
        "runpy.run_module('pipelines', run_name='__main__')\n"
    )
    for words, status in ((["sft"], 42), (["sft", "--profile", "debug"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, "stage", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            capture_output=True,
        )
        assert done.returncode == status


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false", "no"])
def test_the_switch(word: str) -> None:
    assert is_switched_off({"LOCKSTEP_WARM": word})
    assert not is_switched_off({})
    assert not is_switched_off({"LOCKSTEP_WARM": "on"})
