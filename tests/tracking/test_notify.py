"""Somebody is told when a stage fails, warns or ends; nothing of that can hurt a stage."""

import json
import os
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email import message_from_string
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from pipelines.base import background
from pipelines.base.errors import LockstepError
from pipelines.config.profiles import load_profile
from pipelines.doctor.checks import _notify
from pipelines.ledger.entry import Entry
from pipelines.tracking import notify, notify_due, notify_send
from pipelines.tracking.cursor import end_invocation
from pipelines.tracking.notified import Notified
from pipelines.tracking.notify import run_notifier
from pipelines.tracking.notify_due import Scan
from pipelines.tracking.shipper import problem, start_shipper
from tests.ports import free_port
from tests.tracking.fake_clone import FakeClone
from tests.waiting import until

SECRET = "hunter2-very-secret"


class Hook:
    """A real HTTP server that keeps what it is sent."""

    def __init__(self, status: int = 200) -> None:
        self.got: list[dict[str, Any]] = []
        self.status, hook = status, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append(json.loads(body))
                self.send_response(hook.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(message["stage"], message["event"]) for message in self.got]


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


class Mail(socketserver.StreamRequestHandler):
    """The server's side of SMTP, as far as a plain delivery goes."""

    CODES: ClassVar[dict[str, str]] = {"nobody@": "550 no such user", "later@": "450 greylisted"}

    def handle(self) -> None:
        self.say("220 here")
        while line := self.rfile.readline().decode().strip():
            verb = line.partition(" ")[0].upper()
            if verb == "DATA":
                self.say("354 go on")
                lines = []
                while (text := self.rfile.readline().decode()) != ".\r\n":
                    lines.append(text)
                self.server.got.append("".join(lines))  # type: ignore[attr-defined]
            if verb == "QUIT":
                return self.say("221 bye")
            answers = (a for name, a in self.CODES.items() if verb == "RCPT" and name in line)
            self.say(next(answers, "250 ok"))

    def say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@pytest.fixture(autouse=True)
def _short_waits(clone: FakeClone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone.root)
    monkeypatch.setenv("LOCKSTEP_TRACKING", "off")
    monkeypatch.setattr(background, "LINGER_S", 0.0)
    monkeypatch.setattr(background, "INTERVAL_S", 0.05)
    monkeypatch.setattr(background, "GIVE_UP_S", 0.2)


def configure(clone: FakeClone, **values: Any) -> None:
    """The profile of the clone's jobs."""
    folder = clone.root / "slurm_profiles"
    folder.mkdir(exist_ok=True)
    (folder / "laptop.yaml").write_text(f"executor: local\nnotify: {json.dumps(values)}\n")


def tell(clone: FakeClone) -> None:
    """What the background process does, in this one."""
    run_notifier(clone.repository, 5.0)


def fail(clone: FakeClone, stage: str, error: str = "RuntimeError: out of memory\nmore") -> Any:
    entry = clone.begin(stage)
    clone.end(entry, "failed", error=error)
    return entry


def test_a_webhook_gets_failures_once_with_what_there_is_to_know(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    fail(clone, "sft")
    tell(clone)
    [message] = hook.got
    assert message["text"] == "sft failed: RuntimeError: out of memory (clone)"
    assert message["error"] == "RuntimeError: out of memory\nmore"
    expected = {"event": "failed", "stage": "sft", "profile": "laptop", "host": "node-1"}
    assert {key: message[key] for key in expected} == expected
    clone.run("prepare")
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_a_stage_that_fails_again_is_told_again_and_its_end_if_wanted(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url, on=["failed", "ended"])
    entry = fail(clone, "sft")
    tell(clone)
    clone.start(entry)
    clone.end(entry, "failed", error="again")
    tell(clone)
    clone.start(entry)
    clone.finish(entry)
    tell(clone)
    tell(clone)
    assert hook.events == [("sft", "failed"), ("sft", "failed"), ("sft", "ended")]


def test_a_failure_that_a_driver_may_still_mend_is_not_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    entry = fail(clone, "sft")
    with entry.lease():
        assert not list(Scan(clone.repository).owing())
    tell(clone)
    assert hook.events == [("sft", "failed")]


@pytest.mark.parametrize("dies", [True, False])
def test_a_failure_that_may_be_retried_is_told_when_nobody_does(
    clone: FakeClone, hook: Hook, monkeypatch: pytest.MonkeyPatch, dies: bool
):
    configure(clone, webhook=hook.url)
    entry = clone.begin("sft")
    end_retryably(clone, entry, dies)
    look(clone)
    clone.start(entry)
    end_retryably(clone, entry, dies)
    look(clone)
    assert hook.events == [], "a flow may try again"
    monkeypatch.setattr(notify_due, "RETRY_WAIT_S", 0.0)
    tell(clone)
    tell(clone)
    assert [message["attempts"] for message in hook.got] == [2]


def test_a_failure_is_told_at_once_when_its_command_has_ended(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    end_retryably(clone, clone.begin("sft"), dies=True)
    end_invocation(clone.repository, "run")
    look(clone)
    assert hook.events == [("sft", "failed")]


def test_a_failure_in_the_folder_of_an_experiment_does_not_wait_for_a_retry(
    tmp_path: Path, hook: Hook
):
    clone = FakeClone(tmp_path / "repository/.dvc/tmp/exps/one")
    configure(clone, webhook=hook.url)
    end_retryably(clone, clone.begin("sft"), dies=False)
    look(clone)
    assert hook.events == [("sft", "failed")]


def end_retryably(clone: FakeClone, entry: Entry, dies: bool) -> None:
    if dies:
        clone.die(entry)
    else:
        clone.end(entry, "failed", error="OSError: no space", retryable=True)


def look(clone: FakeClone) -> None:
    """What the background process does once, when it stays."""
    notifier = notify.Notifier(clone.repository)
    assert notifier.is_busy()
    notifier.send()


def test_what_was_cancelled_by_hand_is_not_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url, on=["failed", "ended"])
    clone.end(clone.begin("sft"), "cancelled")
    tell(clone)
    assert hook.got == []


def test_each_kind_of_warning_is_told_once(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    metrics = clone.root / "metrics/evaluations/sft.json"
    metrics.parent.mkdir(parents=True)
    clone.run("evaluate_sft")
    bad = {"accuracy": 0.0, "accuracy_sampled": 0.0, "truncation_rate": 1.0, "num_judged": 9}
    metrics.unlink(missing_ok=True)
    metrics.write_text(json.dumps(bad))
    tell(clone)
    [message] = hook.got
    assert message["event"] == "warning"
    assert len(message["warnings"]) >= 1
    tell(clone)
    assert len(hook.got) == 1


def test_what_ended_before_anybody_wanted_to_know_is_not_told(clone: FakeClone, hook: Hook):
    entry = fail(clone, "sft")
    attempt = entry.attempts()[-1]
    attempt.write(replace(attempt.result, ended=time.time() - 500))
    configure(clone, webhook=hook.url)
    tell(clone)
    assert hook.got == []


@contextmanager
def mail_server() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The profile's `email` for a server that takes everything, and what it got."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail) as server:
        server.daemon_threads = True
        got: list[str] = []
        server.got = got  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield (
            {"host": "127.0.0.1", "port": server.server_address[1], "sender": "lockstep@here"},
            got,
        )
        server.shutdown()


def test_an_email_arrives_with_a_subject_of_one_line(clone: FakeClone):
    with mail_server() as (email, got):
        configure(clone, email={**email, "to": ["a@here", "b@here"]})
        fail(clone, "sft", "ValueError: bad\nBcc: everybody@there")
        tell(clone)
    for text in got:
        mail = message_from_string(text)
        assert mail["Subject"] == "sft failed: ValueError: bad (clone)"
        assert (mail["From"], mail["To"], mail["Bcc"]) == ("lockstep@here", "a@here, b@here", None)
        assert "stage: sft" in mail.get_payload()
    assert len(got) == 2, "one for each"


def test_a_recipient_that_is_refused_is_said_and_one_for_later_is_tried_again(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    with mail_server() as (email, got):
        configure(clone, email={**email, "to": ["a@here", "nobody@here"]})
        fail(clone, "sft")
        tell(clone)
        assert "email to nobody@here: the mail server answers 550" in (
            problem(clone.repository) or ""
        )
        configure(clone, email={**email, "to": ["a@here", "later@here"]})
        fail(clone, "prepare")
        tell(clone)
        assert len(got) == 2, "the one that is there has each message"
        assert "email to later@here: the mail server answers 450" in (
            problem(clone.repository) or ""
        )
        monkeypatch.setattr(Mail, "CODES", {})
        tell(clone)
        assert len(got) == 3, "only the one that had not got it gets it"


def test_a_command_gets_the_message_and_one_that_hangs_is_ended(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    configure(clone, command="cat > told.json; sleep 1000 & echo $! > left; exit 0")
    fail(clone, "sft")
    tell(clone)
    assert json.loads((clone.root / "told.json").read_text())["stage"] == "sft"
    until_gone(clone.root / "left")
    monkeypatch.setattr(notify_send, "LONGEST_S", 0.5)
    configure(clone, command="echo $$ > pid; sleep 1000")
    fail(clone, "prepare")
    tell(clone)
    until_gone(clone.root / "pid")
    assert "command: it did not end within" in (problem(clone.repository) or "")


def until_gone(noted: Path) -> None:
    """Until the process whose id was noted has ended."""
    pid = int(noted.read_text())
    until(lambda: not psutil.pid_exists(pid) or is_zombie(pid), f"{noted.name} is ended")


def is_zombie(pid: int) -> bool:
    """Nobody reaps an orphan where the first process of a container does not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_a_command_prints_is_in_the_log_without_secrets(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TEAM_WEBHOOK", f"http://127.0.0.1/{SECRET}")
    configure(clone, command="echo to $TEAM_WEBHOOK; echo and $TEAM_WEBHOOK >&2")
    fail(clone, "sft")
    tell(clone)
    printed = "".join(capfd.readouterr())
    assert "to ***" in printed
    assert "and ***" in printed
    assert SECRET not in printed


def test_a_server_that_is_down_gets_the_message_when_it_is_up(clone: FakeClone, tmp_path: Path):
    port = free_port()
    told = tmp_path / "told"
    configure(
        clone, webhook=f"http://127.0.0.1:{port}/{SECRET}", command=f"cat >> {told}; echo >> {told}"
    )
    fail(clone, "sft")
    tell(clone)
    said = problem(clone.repository) or ""
    assert "a notification failed (webhook: " in said
    assert "stages are not affected" in said
    hook = Hook()
    configure(clone, webhook=hook.url, command=f"cat >> {told}; echo >> {told}")
    tell(clone)
    hook.server.shutdown()
    assert hook.events == [("sft", "failed")]
    assert len(told.read_text().splitlines()) == 1, "what was delivered is not delivered again"
    assert problem(clone.repository) is None


def test_a_job_that_died_is_told_whenever_it_had_started(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch, hook: Hook
):
    monkeypatch.setattr(notify_due, "RETRY_WAIT_S", 0.0)
    entry = clone.begin("sft")
    start_earlier(entry, hours=2)
    configure(clone, webhook=f"http://127.0.0.1:{free_port()}/")
    assert notify.Notifier(clone.repository).is_busy(), "it lives when somebody first asks"
    clone.die(entry)
    tell(clone)
    assert "webhook: " in (problem(clone.repository) or "")
    configure(clone, webhook=hook.url)
    tell(clone)
    assert hook.events == [("sft", "failed")]
    assert time.time() - hook.got[0]["time"] < 60


def start_earlier(entry: Entry, hours: float) -> None:
    """As if its job had started then, and had said nothing since."""
    attempt, then = entry.attempts()[-1], time.time() - hours * 3600
    assert attempt.worker is not None
    attempt.write(replace(attempt.worker, time=then))
    attempt.write(replace(attempt.launched, time=then))
    for path in (*attempt.logs(), entry.folder / "metrics.jsonl"):
        os.utime(path, (then, then))


def test_the_next_failure_is_told_by_every_way_though_one_still_lacks_the_last(
    clone: FakeClone, hook: Hook
):
    mail = {"host": "127.0.0.1", "port": free_port(), "sender": "a@here", "to": ["b@here"]}
    configure(clone, webhook=hook.url, email=mail)
    entry = fail(clone, "sft")
    tell(clone)
    clone.start(entry)
    clone.end(entry, "failed", error="again")
    tell(clone)
    assert [message["attempts"] for message in hook.got] == [1, 2]


def test_a_line_that_is_added_to_a_profile_tells_nothing_of_before(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url, on=["failed"])
    entry = clone.run("sft")
    attempt = entry.attempts()[-1]
    attempt.write(replace(attempt.result, ended=time.time() - 500))
    died = clone.begin("prepare")
    start_earlier(died, hours=2)
    clone.die(died)
    tell(clone)
    configure(clone, webhook=hook.url, on=["failed", "ended"])
    tell(clone)
    assert hook.got == []
    clone.run("evaluate_sft")
    tell(clone)
    assert hook.events == [("evaluate_sft", "ended")]


def test_an_entry_that_cannot_be_read_is_said_and_the_others_are_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    (fail(clone, "sft").folder / "notified.json").write_text("{")
    fail(clone, "prepare")
    tell(clone)
    assert hook.events == [("prepare", "failed")]
    assert "notified.json is no JSON" in (problem(clone.repository) or "")


def test_a_text_that_no_encoding_takes_is_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    fail(clone, "sft", "ValueError: \udcff")
    tell(clone)
    assert [message["error"] for message in hook.got] == ["ValueError: \\udcff"]


def test_a_damaged_file_of_the_notifier_ends_no_command(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    clone.repository.home.mkdir(exist_ok=True)
    (clone.repository.home / "notify.json").write_text("{")
    start_shipper(clone.repository)
    assert "address" in json.loads((clone.repository.home / "notify.json").read_text())


def test_what_is_refused_or_too_late_is_left_and_said(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    hook = Hook(status=404)
    configure(clone, webhook=hook.url)
    fail(clone, "sft")
    tell(clone)
    tell(clone)
    hook.server.shutdown()
    assert len(hook.got) == 1
    assert "webhook: status 404" in (problem(clone.repository) or "")
    monkeypatch.setattr(notify, "LATEST_S", -1.0)
    configure(clone, webhook=f"http://127.0.0.1:{free_port()}/")
    entry = fail(clone, "prepare")
    tell(clone)
    assert Notified.of(entry).told == ("failed 1",)


def test_a_server_that_never_answers_holds_nobody_up(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    """It drips: each read is in time, the whole answer never."""

    class Drip(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while not self.server.done.wait(0.05):  # type: ignore[attr-defined]
                self.request.sendall(b"H")

    monkeypatch.setattr(notify_send, "LONGEST_S", 0.5)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads, server.done = True, threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        configure(clone, webhook=f"http://127.0.0.1:{server.server_address[1]}/")
        fail(clone, "sft")
        started = time.monotonic()
        start_shipper(clone.repository)  # what a stage's driver calls
        assert time.monotonic() - started < 2
        tell_or_wait(clone)
        server.done.set()  # type: ignore[attr-defined]
        server.shutdown()
    assert "a notification failed (webhook: " in (problem(clone.repository) or "")


def tell_or_wait(clone: FakeClone) -> None:
    """Two at once: the one that has the lock tells."""
    tell(clone)
    until(lambda: problem(clone.repository), "the problem is said")


def test_two_commands_at_once_tell_it_once(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    fail(clone, "sft")
    start_shipper(clone.repository)
    start_shipper(clone.repository)
    tell(clone)
    until(lambda: hook.got, "it is told")
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_secrets_come_from_the_environment_and_are_written_nowhere(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    hook = Hook(status=500)
    monkeypatch.setenv("MY_WEBHOOK", hook.url)
    configure(clone, webhook="$MY_WEBHOOK")
    fail(clone, "sft", f"cannot reach {hook.url}")
    tell(clone)
    hook.server.shutdown()
    assert hook.got
    assert SECRET not in json.dumps(hook.got)
    assert "status 500" in (problem(clone.repository) or "")
    kept = [path for path in clone.repository.home.rglob("*") if path.is_file()]
    ours = [path for path in kept if "notif" in path.name]
    assert len(ours) >= 3
    assert not [path for path in ours if SECRET.encode() in path.read_bytes()]


def test_a_variable_that_is_not_set_loses_nothing(
    clone: FakeClone, hook: Hook, monkeypatch: pytest.MonkeyPatch
):
    configure(clone, webhook="$MY_WEBHOOK")
    fail(clone, "sft")
    before = notify.notifier_process(clone.repository)
    tell(clone)
    assert "webhook: variable 'MY_WEBHOOK' is not set" in (problem(clone.repository) or "")
    monkeypatch.setenv("MY_WEBHOOK", hook.url)
    assert notify.notifier_process(clone.repository) != before, "one that has it takes over"
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_doctor_names_a_variable_that_is_not_set(clone: FakeClone, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_PROFILE", "laptop")
    configure(clone, webhook="$MY_WEBHOOK")
    [check] = _notify(clone.repository)
    assert (check.fine, check.detail) == (False, "MY_WEBHOOK not set")
    monkeypatch.setenv("MY_WEBHOOK", f"http://127.0.0.1/{SECRET}")
    [check] = _notify(clone.repository)
    assert (check.fine, check.detail) == (True, "failed, warning: webhook")
    configure(clone, on=["failed"])
    [check] = _notify(clone.repository)
    assert "neither webhook, command nor email" in check.detail


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"webhok": "http://x"}, "did you mean `notify.webhook`?"),
        ({"webhook": "slack"}, "notify.webhook"),
        ({"webhook": "$"}, "notify.webhook"),
        ({"webhook": "$TEAM-WEBHOOK"}, "notify.webhook"),
        ({"on": ["fail"]}, "notify.on"),
        (
            {"email": {"host": "h", "sender": "a", "to": ["b"], "password": "x"}},
            "a password does not belong in a profile",
        ),
    ],
)
def test_what_is_wrong_in_a_profile_is_said_by_its_key(
    clone: FakeClone, values: dict[str, Any], expected: str
):
    configure(clone, **values)
    with pytest.raises(LockstepError, match=r"laptop\.yaml") as error:
        load_profile(clone.root, "laptop")
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "notify : {{webhook: '{url}'}}",
        "'notify': {{webhook: '{url}'}}",
        "notify:\n  webhook: '{url}'",
        "? notify\n: webhook: '{url}'",
    ],
)
def test_notify_is_found_however_yaml_spells_it(clone: FakeClone, hook: Hook, text: str):
    configure(clone)
    profile = clone.root / "slurm_profiles/laptop.yaml"
    profile.write_text(f"executor: local\n{text.format(url=hook.url)}\n")
    fail(clone, "sft")
    assert notify.is_configured(clone.repository)
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_without_notify_nothing_is_started(clone: FakeClone):
    profile = clone.root / "slurm_profiles/laptop.yaml"
    profile.parent.mkdir()
    profile.write_text("executor: local\n")
    start_shipper(clone.repository)
    assert not (clone.repository.home / "notify.json").exists()
    assert not clone.processes_of("pipelines.tracking.notify")
    profile.write_text("executor: local\n# notify: {}\n")
    with fail(clone, "sft").lease():  # work that a notifier would stay for
        tell(clone)
