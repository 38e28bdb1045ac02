"""Runs a program in the sandbox, from outside.

Every program gets a launcher of its own, and with it its own namespaces. The caller feeds and reads
pipes and otherwise waits. Closing the control pipe ends the sandbox; the kernel closes it when the
caller dies, so no sandbox outlives the one who asked for it.
"""

import contextlib
import os
import secrets
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stages.rewards.sandbox import bubblewrap, launcher
from stages.rewards.sandbox.root import interpreter, library_folder
from stages.rewards.sandbox.status import Kind, Status
from stages.rewards.sandbox.supervisor import MAIN
from stages.rewards.sandbox.values import Limits, Outcome, SandboxBroken

_PROJECT = Path(__file__).resolve().parents[3]
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

    def give_up(self, end: int) -> int:
        self._open.remove(end)
        return end

    def close(self, *ends: int) -> None:  # type: ignore[override]
        for end in ends:
            os.close(self.give_up(end))


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
    """A descriptor, and what is to be written into it."""

    def __init__(self, end: int | None, content: bytes = b"") -> None:
        self.end = end
        self._rest = memoryview(content)
        if end is not None:
            os.set_blocking(end, False)

    def write_some(self) -> bool:
        """Returns whether nothing is left to write, or nobody to read it."""
        assert self.end is not None
        try:
            self._rest = self._rest[os.write(self.end, self._rest[:_CHUNK]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            return True
        return not self._rest

    def close(self) -> None:
        if self.end is not None:
            os.close(self.end)
            self.end = None


@dataclass(frozen=True)
class Running:
    """A sandbox at work."""

    process: subprocess.Popen[bytes]
    report: int
    """Brings what the supervisor says."""


@contextlib.contextmanager
def started(
    source: str,
    files: Mapping[str, bytes],
    limits: Limits,
    streams: tuple[int, int, int],
    kind: Kind,
) -> Iterator[Running]:
    """A sandbox that runs `source` with these standard streams; gone when the block is left."""
    for name in files:
        if name in ("", ".", "..", MAIN) or "/" in name:
            raise ValueError(f"{name!r} is no name for a file beside {MAIN}")
    task = {
        "kind": str(kind),
        "limits": asdict(limits),
        "files": {**files, MAIN: source.encode("utf-8", "surrogatepass")},
    }
    folder = tempfile.mkdtemp(prefix="unisolated-") if kind is Kind.NONE else None
    with Descriptors() as ends:
        taken, control = ends.pipe()
        report, said = ends.pipe()
        passed = [taken, said]
        command = [interpreter(), "-S", "-s", "-m", launcher.__name__]
        if kind is Kind.BUBBLEWRAP:
            passed.append(ends.own(bubblewrap.code()))
            command = bubblewrap.command(passed[-1], limits.file_mb, launcher.NOBODY)
        process = subprocess.Popen(
            [*command, str(taken), str(said)],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            cwd=folder or _PROJECT,
            env={"LD_LIBRARY_PATH": library_folder(), "PYTHONPATH": str(_PROJECT)},
            pass_fds=passed,
            start_new_session=True,
        )
        try:
            ends.close(*passed)
            with contextlib.suppress(BrokenPipeError):
                _write_all(control, launcher.packed(task))
            yield Running(process, report)
        finally:
            ends.close(control)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if folder is not None:
                _remove(folder)


def run_program(
    source: str,
    stdin: bytes | str = b"",
    files: Mapping[str, bytes] | None = None,
    limits: Limits | None = None,
    *,
    kind: Kind,
) -> Outcome:
    """Run a Python program with `files` in its folder, and say how it ended.

    Raises SandboxBroken where the sandbox failed, whatever the program did.
    """
    limits = limits or Limits()
    given = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
    with Descriptors() as ends:
        stdin_r, stdin_w = ends.pipe()
        out_r, out_w = ends.pipe()
        err_r, err_w = ends.pipe()
        handed_on = (stdin_r, out_w, err_w)
        with started(source, files or {}, limits, handed_on, kind) as sandbox:
            ends.close(*handed_on)
            cap = limits.output_kb * 1024
            out, err, report = Stream(cap), Stream(cap), Stream(_CHUNK)
            feed = Feed(ends.give_up(stdin_w), given)
            listen({out_r: out, err_r: err, sandbox.report: report}, GRACE_S + limits.wall_s, feed)
        if out.overran or err.overran:
            return Outcome(Status.OUTPUT, None, out.text(), err.text())
        ended = read_report(report, err)
        return Outcome(ended.status, ended.exit_code, out.text(), err.text())


def listen(streams: Mapping[int, Stream], seconds: float, feed: Feed | None = None) -> None:
    """Read all streams to their end; stop when one overruns or the time is over."""
    deadline = time.monotonic() + seconds
    waiting = set(streams)
    with selectors.DefaultSelector() as ready, contextlib.closing(feed or Feed(None)) as fed:
        for end in streams:
            ready.register(end, selectors.EVENT_READ)
        if fed.end is not None:
            ready.register(fed.end, selectors.EVENT_WRITE)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                if key.fd == fed.end:
                    if fed.write_some():
                        ready.unregister(key.fd)
                        fed.close()
                elif part := os.read(key.fd, _CHUNK):
                    if streams[key.fd].take(part):
                        return
                else:
                    ready.unregister(key.fd)
                    waiting.remove(key.fd)


@dataclass(frozen=True)
class Report:
    """What the supervisor said."""

    status: Status
    exit_code: int | None


def read_report(stream: Stream, stderr: Stream) -> Report:
    lines = stream.text().splitlines()
    for line in lines:
        if line.startswith("failed "):
            raise SandboxBroken(line.removeprefix("failed "))
    if not lines:
        raise SandboxBroken(
            "the sandbox ended without a word; was it killed from outside, or was the machine out "
            f"of memory? Its last lines: {stderr.text()[-1000:]!r}"
        )
    status, *code = lines[0].split()
    return Report(Status(status), int(code[0]) if code else None)


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


def _write_all(end: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(end, view) :]
