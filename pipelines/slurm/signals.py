"""The signals by which Slurm tells a job that it is about to end it."""

import signal
import threading
from collections.abc import Callable


class SlurmWarning:
    """Slurm's early warning that the job is about to end: USR2, or TERM where it gives no other.

    Slurm sends it to every process of the job. USR2 is blocked here, and so in every helper process
    started from here, which it would otherwise kill; one thread waits for it.
    """

    def __init__(self, *, listening: bool = False) -> None:
        self.came = False
        self.listening = listening
        """Whether signals are heard already: here, or by somebody who calls `come`."""
        self._answer: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """To be called first of all, before any other thread or process is there."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        threading.Thread(target=self._wait, name="slurm-warning", daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: self.come())
        self.listening = True

    def answer(self, answer: Callable[[], None]) -> None:
        """What to do when it comes, or has come."""
        self._answer = answer
        if self.came:
            answer()

    def _wait(self) -> None:
        signal.sigwait([signal.SIGUSR2])
        self.come()

    def come(self) -> None:
        self.came = True
        self._answer()
