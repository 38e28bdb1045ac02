"""Sending one message, by each way that a profile gives. Every way ends within a fixed time."""

import json
import os
import signal
import smtplib
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from email.message import EmailMessage
from functools import partial
from typing import IO, Any

from pipelines.base.redact import redact
from pipelines.config.notify import Email, Notify, filled_in
from pipelines.tracking.errors import RefusedError, UnreachableError

TIMEOUT_S = 10.0
LONGEST_S = 30.0
"""Of one way, whatever the other side does."""
LARGEST_OUTPUT = 64 * 1024
"""How much of what a command prints is kept in the log."""

Message = dict[str, Any]


def ways_of(notify: Notify) -> dict[str, Callable[[Message], None]]:
    """Each way by name; calling it raises UnreachableError or RefusedError."""
    ways: dict[str, Callable[[Message], None]] = {}
    webhook, command, email = notify.webhook, notify.command, notify.email
    if webhook:
        ways["webhook"] = lambda message: _in_time(lambda: _post(webhook, message))
    if command:
        ways["command"] = lambda message: _run(command, message)
    if email:
        for address in email.to:
            ways[f"email to {address}"] = partial(_mail_in_time, email, address)
    return ways


def _mail_in_time(email: Email, address: str, message: Message) -> None:
    _in_time(lambda: _mail(email, address, message))


def _in_time(work: Callable[[], None]) -> None:
    """Libraries have a time limit for each read, which a server that drips never meets."""
    errors: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(LONGEST_S)
    if thread.is_alive():
        raise UnreachableError(f"no answer in {LONGEST_S:.0f} s")
    if not errors:
        return
    [error] = errors
    if isinstance(error, UnreachableError | RefusedError):
        raise error
    if isinstance(error, KeyError):
        # A command that has it may be next: its notifier takes over.
        raise UnreachableError(f"variable {error} is not set")
    # Not its text, which may quote an address or an answer.
    reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
    raise UnreachableError(reason) if isinstance(error, OSError) else RefusedError(reason)


def _post(address: str, message: Message) -> None:
    import httpx

    try:
        answer = httpx.post(filled_in(address), json=message, timeout=TIMEOUT_S)
    except httpx.TransportError as error:
        raise UnreachableError(redact(str(error)) or type(error).__name__) from None
    if answer.status_code >= 500 or answer.status_code == 429:
        raise UnreachableError(f"status {answer.status_code}")
    if answer.status_code >= 300:
        raise RefusedError(f"status {answer.status_code}")


def _mail(email: Email, address: str, message: Message) -> None:
    """To one of its recipients: a server may take one now, another later and refuse a third."""
    mail = EmailMessage()
    mail["Subject"] = " ".join(message["text"].split())[:200]
    mail["From"] = email.sender
    mail["To"] = ", ".join(email.to)
    lines = (f"{key}: {value}" for key, value in message.items() if value not in (None, "", []))
    mail.set_content("\n".join(lines) + "\n")
    user = filled_in(email.user) if email.user else None
    password = filled_in(email.password) if email.password else ""
    try:
        with _connect(email) as server:
            if user is not None:
                server.login(user, password)
            server.send_message(mail, to_addrs=[address])
    except smtplib.SMTPResponseException as error:
        raise _answered(error.smtp_code) from None
    except smtplib.SMTPRecipientsRefused as error:
        [(code, _)] = error.recipients.values()
        raise _answered(code) from None


def _answered(code: int) -> UnreachableError | RefusedError:
    """Codes of 400 and more ask to try again later, as one that greylists does."""
    text = f"the mail server answers {code}"
    return UnreachableError(text) if 400 <= code < 500 else RefusedError(text)


def _connect(email: Email) -> smtplib.SMTP:
    secure = ssl.create_default_context() if email.tls or email.starttls else None
    if email.tls:
        return smtplib.SMTP_SSL(email.host, email.port, timeout=TIMEOUT_S, context=secure)
    server = smtplib.SMTP(email.host, email.port, timeout=TIMEOUT_S)
    if email.starttls:
        server.starttls(context=secure)
    return server


def _run(command: str, message: Message) -> None:
    """In a session of its own, so that what it has started ends with it.

    Its output goes to a file, which a process that it leaves behind does not hold open, and from
    there to the log without the secrets.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(json.dumps(message), timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise RefusedError(f"it did not end within {LONGEST_S:.0f} s") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _print_redacted(output)
    if process.returncode:
        raise RefusedError(f"exit status {process.returncode}")


def _print_redacted(output: IO[bytes]) -> None:
    output.seek(0)
    text = output.read(LARGEST_OUTPUT).decode(errors="replace")
    if text:
        print(redact(text), flush=True)
