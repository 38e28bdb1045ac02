"""The ways of a notification: what they carry, and what may be wrong with the other side."""

import json
import socketserver
import threading
from email import message_from_string
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipelines.base import background
from pipelines.tracking import notify, notify_send
from pipelines.tracking.shipper import problem, start_shipper
from tests.ports import free_port
from tests.tracking.fake_clone import FakeClone
from tests.tracking.notify_tools import SECRET, Hook, Mail, configure, fail, mail_server, tell
from tests.waiting import FOR_EVER_S, must_not_wait, until

pytestmark = pytest.mark.usefixtures("short_waits")


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
    configure(clone, command="echo $$ > pid; sleep 1000")
    noted = clone.root / "pid"
    # A shell that was held up is ended before its first word; the next one has more time.
    for stage, limit in (("prepare", 0.5), ("reward_model", 10.0), ("evaluate_sft", 60.0)):
        monkeypatch.setattr(notify_send, "LONGEST_S", limit)
        fail(clone, stage)
        tell(clone)
        if noted.exists() and noted.read_text():
            break
    until_gone(noted)
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


@must_not_wait
def test_a_server_that_never_answers_holds_nobody_up(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    """It drips: each read is in time, the whole answer never."""

    class Drip(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while not self.server.done.wait(0.05):  # type: ignore[attr-defined]
                self.request.sendall(b"H")

    started: list[object] = []
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads, server.done = True, threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        configure(clone, webhook=f"http://127.0.0.1:{server.server_address[1]}/")
        fail(clone, "sft")
        with monkeypatch.context() as patch:
            # A process that never tells: whoever waited for it, or told by itself, would not end.
            process = SimpleNamespace(poll=lambda: None)
            patch.setattr(
                background, "start_process", lambda *words: started.append(words) or process
            )
            patch.setattr(background, "START_TIMEOUT_S", FOR_EVER_S)
            patch.setattr(notify_send, "LONGEST_S", FOR_EVER_S)
            start_shipper(clone.repository)  # what a stage's driver calls
        assert started
        monkeypatch.setattr(notify_send, "LONGEST_S", 0.5)
        tell(clone)
        server.done.set()  # type: ignore[attr-defined]
        server.shutdown()
    assert "a notification failed (webhook: " in (problem(clone.repository) or "")


def test_a_text_that_no_encoding_takes_is_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    fail(clone, "sft", "ValueError: \udcff")
    tell(clone)
    assert [message["error"] for message in hook.got] == ["ValueError: \\udcff"]


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
