"""The launcher of this process: started when the first sandbox is asked for, and ready after that.

It ends when this process does, which is the only one that has the other end of its socket. One that
is gone, and one that belongs to the process this one was forked from, is replaced.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass

from stages.rewards.sandbox import launcher
from stages.rewards.sandbox.root import environment, python_calling
from stages.rewards.sandbox.values import SandboxBroken

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Launcher:
    """A process that forks sandboxes, and who asks it to."""

    process: subprocess.Popen[bytes]
    asked: socket.socket
    owner: int

    @classmethod
    def start(cls) -> "Launcher":
        ours, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                [*python_calling("main"), str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=environment(),
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        assert process.stderr is not None
        with process.stderr as errors:
            if ours.recv(1) != launcher.READY:
                last = errors.read().decode("utf-8", "replace").strip()[-1000:]
                raise SandboxBroken(f"its launcher does not start: {last}")
        return cls(process, ours, os.getpid())

    def end(self) -> None:
        self.asked.close()
        self.process.kill()
        self.process.wait()


_launcher: Launcher | None = None


def ask_for_a_sandbox(*descriptors: int) -> Callable[[], None]:
    """Control, report and the three standard streams go to a new sandbox. Returns what kills it, if
    nothing else does: all that this launcher forked.
    """
    global _launcher
    with _one_at_a_time:
        if _launcher is not None and _launcher.owner != os.getpid():
            _launcher.asked.close()
            _launcher = None
        for _ in range(2):
            _launcher = _launcher or Launcher.start()
            try:
                socket.send_fds(_launcher.asked, [b"s"], descriptors)
                return _launcher.end
            except OSError:
                # It was killed.
                _launcher.end()
                _launcher = None
        raise SandboxBroken("its launcher ends at once")
