"""Runs a program in the sandbox, from outside.

Every program gets namespaces of its own from a launcher, which forks them (see launcher.py), or
from bubblewrap. The caller feeds and reads pipes and otherwise waits. Closing the control pipe ends
the sandbox; the kernel closes it when the caller dies, so no sandbox outlives the one who asked for
it. The report pipe comes to its end when everything in the sandbox is gone.
"""

import contextlib
import marshal
import os
import secrets
import select
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stages.rewards.sandbox import bubblewrap, launcher, warm
from stages.rewards.sandbox.root import environment, python_calling
from stages.rewards.sandbox.values import (
    IsolationKind,
    Limits,
    ProgramResult,
    SandboxBroken,
    SandboxRole,
    Status,
)

GRACE_S = 20.0
"""How much longer than `wall_s` a sandbox may take to start and end before it counts as stuck."""
_CHUNK = 1 << 16


class Descriptors(contextlib.ExitStack):
    """Open descriptors that are closed in the end, if not before."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[int] = set()
        self.callback(lambda: self.close(*self._open))

    def own(self, end: int) -> int:
        self._open.add(end)
        return end

    def pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        return self.own(read), self.own(write)

    def close(self, *ends: int) -> None:  # type: ignore[override]
        for end in ends:
            self._open.remove(end)
            os.close(end)


@dataclass
class Stream:
    """What a descriptor brought, up to a limit."""

    limit: int
    content: bytearray = field(default_factory=bytearray)
    overran: bool = False

    def take(self, part: bytes) -> bool:
        """Returns whether that was too much."""
        self.content += part
        self.overran = len(self.content) > self.limit
        del self.content[self.limit :]
        return self.overran

    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


class Feed:
    """A descriptor that takes a content, and is closed after it."""

    def __init__(self, ends: Descriptors, end: int, content: bytes) -> None:
        os.set_blocking(end, False)
        self._ends, self.end, self._rest = ends, end, memoryview(content)

    def write_some(self) -> bool:
        """Returns whether that was all, or nobody is left to read it."""
        try:
            self._rest = self._rest[os.write(self.end, self._rest[:_CHUNK]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._rest = self._rest[:0]
        if not self._rest:
            self._ends.close(self.end)
        return not self._rest


@dataclass(frozen=True)
class Task:
    """What a sandbox is to do."""

    role: SandboxRole
    given: dict[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    """In the folder that it starts in."""


@dataclass(frozen=True)
class Sandbox:
    """The descriptors of one that was started."""

    control: int
    """Takes what the supervisor is told after the task."""
    report: int
    """Brings what the supervisor says; its end is the end of everything in the sandbox."""


@contextlib.contextmanager
def started(
    task: Task, limits: Limits, streams: tuple[int, int, int], kind: IsolationKind
) -> Iterator[Sandbox]:
    """A sandbox with these standard streams, gone when the block is left."""
    packed = marshal.dumps(
        {
            "kind": str(kind),
            "limits": asdict(limits),
            "files": dict(task.files),
            "role": str(task.role),
            "given": task.given,
        }
    )
    folder = tempfile.mkdtemp(prefix="unisolated-") if kind is IsolationKind.NONE else None
    with Descriptors() as ends:
        taken, control = ends.pipe()
        report, report_to = ends.pipe()
        if kind is IsolationKind.NAMESPACES:
            end_by_force = warm.ask_for_a_sandbox(taken, report_to, *streams)
        else:
            end_by_force = _start(taken, report_to, streams, kind, limits, folder)
        try:
            ends.close(taken, report_to)
            with contextlib.suppress(BrokenPipeError), open(control, "wb", closefd=False) as pipe:
                pipe.write(packed)
            yield Sandbox(control, report)
        finally:
            ends.close(control)
            if not _ended(report):
                end_by_force()
            if folder is not None:
                _remove(folder)


def _start(
    taken: int,
    report_to: int,
    streams: tuple[int, int, int],
    kind: IsolationKind,
    limits: Limits,
    folder: str | None,
) -> Callable[[], None]:
    """A process for this one sandbox. Returns what kills it."""
    passed = [taken, report_to]
    with Descriptors() as ends:
        if kind is IsolationKind.BUBBLEWRAP:
            passed.append(ends.own(bubblewrap.code()))
            command = bubblewrap.command(passed[-1], limits.file_mb, launcher.NOBODY)
        else:
            command = python_calling("once")
        process = subprocess.Popen(
            [*command, str(taken), str(report_to)],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            cwd=folder or "/",
            env=environment(),
            pass_fds=passed,
            start_new_session=True,
        )

    def end_by_force() -> None:
        process.kill()
        process.wait()

    return end_by_force


def _ended(report: int) -> bool:
    """Wait for the end of everything that a sandbox held; False if it does not come."""
    deadline = time.monotonic() + GRACE_S
    while (left := deadline - time.monotonic()) > 0:
        if brings(report, left) and not os.read(report, _CHUNK):
            return True
    return False


def brings(end: int, seconds: float) -> bool:
    """Wait until a descriptor, whatever its number, has something to read or comes to its end."""
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def run_program(
    source: str,
    stdin: bytes | str = b"",
    files: Mapping[str, bytes] | None = None,
    limits: Limits | None = None,
    *,
    kind: IsolationKind,
) -> ProgramResult:
    """Run a Python program with `files` in its folder, and say how it ended.

    Raises SandboxBroken where the sandbox failed, whatever the program did.
    """
    for name in files or {}:
        if name in ("", ".", "..", launcher.MAIN) or "/" in name:
            raise ValueError(f"{name!r} is no name for a file beside {launcher.MAIN}")
    limits = limits or Limits()
    main = source.encode("utf-8", "surrogatepass")
    task = Task(SandboxRole.PROGRAM, {"source": main}, {**(files or {}), launcher.MAIN: main})
    given = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
    with Descriptors() as ends:
        stdin_r, stdin_w = ends.pipe()
        out_r, out_w = ends.pipe()
        err_r, err_w = ends.pipe()
        handed_on = (stdin_r, out_w, err_w)
        with started(task, limits, handed_on, kind) as sandbox:
            ends.close(*handed_on)
            cap = limits.output_kb * 1024
            out, err, report = Stream(cap), Stream(cap), Stream(_CHUNK)
            feed = Feed(ends, stdin_w, given)
            listen({out_r: out, err_r: err, sandbox.report: report}, GRACE_S + limits.wall_s, feed)
        if out.overran or err.overran:
            return ProgramResult(Status.OUTPUT, None, out.text(), err.text())
        return ProgramResult(*read_report(report, err), out.text(), err.text())


def listen(streams: Mapping[int, Stream], seconds: float, feed: Feed | None = None) -> None:
    """Read all streams to their end; stop when one overruns or the time is over."""
    deadline = time.monotonic() + seconds
    waiting = set(streams)
    with selectors.DefaultSelector() as ready:
        for end in streams:
            ready.register(end, selectors.EVENT_READ)
        if feed is not None:
            ready.register(feed.end, selectors.EVENT_WRITE)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                if feed is not None and key.fd == feed.end:
                    if feed.write_some():
                        ready.unregister(key.fd)
                elif part := os.read(key.fd, _CHUNK):
                    if streams[key.fd].take(part):
                        return
                else:
                    ready.unregister(key.fd)
                    waiting.remove(key.fd)


def read_report(stream: Stream, stderr: Stream) -> tuple[Status, int | None]:
    """What the supervisor said: how the program ended, and its exit code where it finished."""
    lines = stream.text().splitlines()
    for line in lines:
        if line.startswith("failed "):
            raise SandboxBroken(line.removeprefix("failed "))
    if not lines:
        raise SandboxBroken(
            "the sandbox exited without reporting a result; was it killed from outside, or was the "
            f"machine out of memory? Its last lines: {stderr.text()[-1000:]!r}"
        )
    status, *code = lines[0].split()
    return Status(status), int(code[0]) if code else None


def _remove(folder: str) -> None:
    """A program's folder. It may be deeper than a path is long, and closed to its owner.

    So what is in a folder is moved up before the folder goes. Whoever still writes into it, which
    only happens without isolation, is not waited for.
    """
    name, number = secrets.token_hex(8), 0
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(OSError):
        while (entries := list(os.scandir(folder))) and time.monotonic() < deadline:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    Path(entry.path).unlink()
                    continue
                Path(entry.path).chmod(0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        # Moving a folder writes into it: its own rights count, too.
                        Path(inner.path).chmod(0o700)
                    number += 1
                    Path(inner.path).rename(f"{folder}/{name}-{number}")
                Path(entry.path).rmdir()
        Path(folder).rmdir()
