"""Termination signals: recorded, to be handled by the command when it is safe."""

import signal
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Interrupt:
    name: str
    time: float


class Interrupts:
    """The signals received so far, in order."""

    def __init__(self) -> None:
        self.received: list[Interrupt] = []

    def catch(self) -> dict[int, Any]:
        """Start recording; returns the previous handlers."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        return {number: signal.signal(number, self._receive) for number in numbers}

    def _receive(self, number: int, _: Any) -> None:
        self.received.append(Interrupt(signal.Signals(number).name, time.monotonic()))
