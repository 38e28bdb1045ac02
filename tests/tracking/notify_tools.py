"""What tests of notifications share: a webhook, a mail server, a profile and jobs that fail."""

import json
import os
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from pipelines.ledger.entry import Entry
from pipelines.tracking import notify
from pipelines.tracking.notify import run_notifier
from tests.tracking.fake_clone import FakeClone

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


def start_earlier(entry: Entry, hours: float) -> None:
    """As if its job had started then, and had said nothing since."""
    attempt, then = entry.attempts()[-1], time.time() - hours * 3600
    assert attempt.worker is not None
    attempt.write(replace(attempt.worker, time=then))
    attempt.write(replace(attempt.launched, time=then))
    for path in (*attempt.logs(), entry.folder / "metrics.jsonl"):
        os.utime(path, (then, then))


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
