"""The process between a stage and its logs: all that a stage's processes write passes through it.

    python -m pipelines.base.redacting_process OUT ERR

It reads two pipes until nobody can write into them any more, and writes to its own stdout and
stderr what came, without the secrets of its environment. Its stdin is a socket: a byte that comes
there is sent back once all that was written before it is in the logs.

Always true: it is nobody's child and no signal reaches it but KILL, so that it outlives a stage
that is ended, for as long as there is something to write down. Nothing is held back but what may be
the beginning of a secret.
"""

import os
import selectors
import sys
from contextlib import suppress
from dataclasses import dataclass

from pipelines.base.redact import Redaction

CHANNEL, OUT, ERR = 0, 1, 2
_AT_ONCE = 1 << 16


@dataclass
class _Stream:
    source: int
    log: int
    redaction: Redaction
    held: str = ""

    def pass_on(self) -> bool:
        """Write down what has come so far; False once no more can come."""
        while True:
            try:
                data = os.read(self.source, _AT_ONCE)
            except BlockingIOError:
                return True
            # Any bytes are text in this encoding, and the same bytes afterwards.
            text = self.held + data.decode("latin-1")
            settled = self.redaction.settled(text) if data else len(text)
            self.held = text[settled:]
            self._write(self.redaction(text[:settled]).encode("latin-1"))
            if not data:
                return False

    def let_go(self) -> None:
        """Write down what is held back."""
        self._write(self.redaction(self.held).encode("latin-1"))
        self.held = ""

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.log, data) :]
        except OSError:
            pass  # a disk that is full: whatever else the stage writes there says so better


def _read_channel() -> bytes:
    try:
        return os.read(CHANNEL, 1)
    except OSError:
        return b""  # its other end has gone


def main(out: int, err: int) -> None:
    environment = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in os.environb.items()
    }
    redaction = Redaction(environment)
    streams = {source: _Stream(source, log, redaction) for source, log in ((out, OUT), (err, ERR))}
    with selectors.DefaultSelector() as selector:
        for source in (*streams, CHANNEL):
            os.set_blocking(source, source == CHANNEL)
            selector.register(source, selectors.EVENT_READ)
        while streams:
            ready = [key.fd for key, _ in selector.select()]
            asked = _read_channel() if CHANNEL in ready else None
            for source in list(streams) if asked else [fd for fd in ready if fd in streams]:
                if not streams[source].pass_on():
                    selector.unregister(source)
                    del streams[source]
            if asked:
                for stream in streams.values():
                    stream.let_go()
                with suppress(OSError):
                    os.write(CHANNEL, asked)
            elif asked is not None:
                selector.unregister(CHANNEL)


if __name__ == "__main__":
    if not os.fork():
        main(int(sys.argv[1]), int(sys.argv[2]))
