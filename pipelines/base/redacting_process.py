"""The process between a stage and its logs: all output of a stage's processes passes through it.

    python -m pipelines.base.redacting_process OUT ERR

It reads two pipes until all their writers have closed them, and writes what it read to its own
stdout and stderr, without the secrets of its environment. Its stdin is a socket: a byte received
there is sent back once everything written before it is in the logs.

Always true: it is nobody's child and no signal but KILL reaches it, so that it outlives a stage
that is terminated, as long as there is something to write. Only text that may be the beginning of a
secret is held back.
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
        """Write what has arrived; False once all writers have closed the pipe."""
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

    def flush(self) -> None:
        """Write what is held back."""
        self._write(self.redaction(self.held).encode("latin-1"))
        self.held = ""

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.log, data) :]
        except OSError:
            pass  # a full disk: the stage's own writes fail with a better error


def _read_channel() -> bytes:
    try:
        return os.read(CHANNEL, 1)
    except OSError:
        return b""  # the other end is closed


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
                    stream.flush()
                with suppress(OSError):
                    os.write(CHANNEL, asked)
            elif asked is not None:
                selector.unregister(CHANNEL)


if __name__ == "__main__":
    if not os.fork():
        main(int(sys.argv[1]), int(sys.argv[2]))
