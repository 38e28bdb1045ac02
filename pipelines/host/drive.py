"""What a command does here whose work is done in the clone on a host.

Its exit status is that of the command there; 255 is a lost connection, as ssh has it. What is said
of the way there goes to standard error, so that standard output is that of the command alone.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size
from typing import IO

from pipelines.base.console import Console
from pipelines.base.errors import LockstepError
from pipelines.base.interrupts import Interrupts
from pipelines.base.processes import sleep_beside
from pipelines.base.repository import Repository
from pipelines.host.address import Host
from pipelines.host.forwarding import Forwarding, say_servers, show_pages
from pipelines.host.send import bring_back, send
from pipelines.host.ssh import LOST, Connection, connect
from pipelines.host.there import SIGNALS, versions

THERE = "pipelines.host.there"
SENDING = ("run", "plan")
"""Commands about the files as they lie here."""
BRINGING = ("run", "record")
"""Commands that write results into git."""
MOST_INTERRUPTS = 3
"""So many, and nothing is waited for any more."""
POLL_S = 0.1


def drive(host: Host, name: str, words: list[str]) -> int:
    """Run the command `name` with these words on the host; returns its exit status."""
    repository, console = Repository.find(), Console(sys.stderr)
    connection = connect(host)
    console.line(f"on {host.name}")
    files = send(connection, repository.root, console.line) if name in SENDING else ""
    if name == "run":
        status = _run(connection, [name, *words], files, console)
    elif name == "up":
        status = _up(connection, [name, *words], console)
    elif name == "ui":
        status = _ui(connection, [name, *words], repository.home / "ui/open.html")
    elif sys.stdin.isatty() and sys.stdout.isatty():
        script = connection.python("pipelines", name, *words)
        status = subprocess.run(connection.command(script, "-t"), check=False).returncode
    else:
        status = relay(connection.command(connection.python(THERE, "do", name, *words)))
    if status == LOST:
        console.line(f"lockstep: the connection to {host.address} has ended")
    elif name in BRINGING:
        bring_back(connection, repository.root, console.line)
    return status


def _run(connection: Connection, words: list[str], files: str, console: Console) -> int:
    columns = get_terminal_size().columns if sys.stdout.isatty() else 0
    settings = json.dumps({"versions_here": versions(), "columns": columns, "files": files})
    follow = connection.python(THERE, "follow", settings, *words)
    status = relay(connection.command(follow))
    if status == LOST:
        console.line(
            f"a run that has begun on {connection.host.name} goes on there: the same command "
            "follows it again, `lockstep status` shows it, `lockstep cancel` ends its jobs"
        )
    return status


def _up(connection: Connection, words: list[str], console: Console) -> int:
    status = relay(connection.command(connection.python(THERE, "do", *words)))
    if status == 0:
        with Forwarding(connection) as forwarding:
            say_servers(forwarding, console)
            status = _hold(connection)
    return status


def _ui(connection: Connection, words: list[str], page: Path) -> int:
    """The pages of the clone there, until Ctrl-C; the link is that of the port here."""
    forwarding, interrupts = Forwarding(connection), Interrupts()
    is_opened = "--open" in words
    ui = connection.python(THERE, "do", *(word for word in words if word != "--open"))

    def show(output: IO[str]) -> None:
        show_pages(forwarding, output, page if is_opened else None)

    with forwarding:
        status = relay(connection.command(ui), show, interrupts)
        if status == 0 and not interrupts.received:  # `lockstep up` serves them there
            status = _hold(connection)
    return status


def _hold(connection: Connection) -> int:
    """Keep the connection, and what is forwarded through it, until Ctrl-C."""
    interrupts = Interrupts()
    # Without anybody to pass a signal on to, the connection ends with the first.
    status = relay(connection.command("cat >/dev/null"), None, interrupts, most=1)
    return 0 if interrupts.received else status


def relay(
    command: list[str],
    show: Callable[[IO[str]], None] | None = None,
    interrupts: Interrupts | None = None,
    most: int = MOST_INTERRUPTS,
) -> int:
    """Run a command over ssh, and pass on signals; returns its exit status.

    It has a session of its own, so that Ctrl-C reaches this process alone. The last of several
    interrupts ends the connection; so does the end of this process, however it comes. With `show`,
    that prints the output.
    """
    interrupts = interrupts or Interrupts()
    before = interrupts.catch()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if show else None,
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
        bufsize=1,
    )
    assert process.stdin is not None
    errors: list[LockstepError] = []

    def show_output() -> None:
        try:
            if show and process.stdout:
                show(process.stdout)
        except LockstepError as error:
            errors.append(error)

    shower = threading.Thread(target=show_output, daemon=True)
    passed = 0
    try:
        shower.start()
        while process.poll() is None:
            if errors:
                raise errors[0]
            for interrupt in interrupts.received[passed:]:
                passed += 1
                if interrupt.name not in SIGNALS or passed >= most:
                    return LOST
                with suppress(OSError):
                    process.stdin.write(f"{interrupt.name}\n")
            sleep_beside([process.pid], POLL_S)
        return process.returncode if process.returncode >= 0 else LOST
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with suppress(OSError):
            process.stdin.close()
        if process.poll() is None:
            process.terminate()
            process.wait()
        shower.join()
