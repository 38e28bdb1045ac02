"""The copy of a checkpoint from the node's own disk to the shared scratch, while training goes on.

A thread of each rank copies the files that this rank wrote. Always true:
- On the scratch the checkpoint gets its name once the files of all ranks are there and synced: what
  a kill leaves half copied is never read.
- Ranks tell each other by files beside what they copy, not by collectives: training has those.
"""

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from stages.checkpoint import aside_of, drop_the_oldest, file_names, put_in_place
from stages.engines.processes.ranks import ALONE, Ranks

_BLOCK = 1 << 24
_POLL_S = 0.2
_COPIED, _FAILED = ".copied-", ".failed-"


class _Ended(Exception):
    """Nobody waits for the copy any more."""


class Drain:
    """One rank's part in one copy; all ranks make one at once, and rank 0 has made the folder."""

    def __init__(
        self, on_node: Path, scratch: Path, step: int, own: Sequence[str], ranks: Ranks = ALONE
    ) -> None:
        """`own`: the names of the files that this rank copies."""
        self.step = step
        self.error: OSError | None = None
        self.seconds = 0.0
        """How long it took, once it is over."""
        self._on_node, self._scratch, self._own = on_node, scratch, own
        self._aside = aside_of(scratch, step)
        self._ranks = ranks
        self._own_done, self._all_done, self._ended = Event(), Event(), Event()
        self._thread = Thread(target=self._run, name="drain", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Of rank 0: whether all ranks have copied, and the checkpoint is there, or will not be."""
        return not self._thread.is_alive()

    def join(self) -> bool:
        """Wait until this rank's part is done, and of rank 0, all of it; whether it went well."""
        self._own_done.wait()
        if self._ranks.rank:
            self._ended.set()
        self._thread.join()
        return self.error is None

    def settle(self) -> bool:
        """Wait until all ranks' parts are done; whether they went well. All ranks call it."""
        self._own_done.wait()
        self._ranks.meet(f"the checkpoint of step {self.step} on the shared folder")
        wrong = [text for text in self._ranks.gather(self.error and str(self.error)) if text]
        if wrong and self.error is None:
            self.error = OSError(wrong[0])
        self._all_done.set()
        self._thread.join()
        return self._ranks.same(self.error is None)

    def end(self) -> None:
        """Give it up, where other ranks may be gone."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            for name in self._own:
                self._copy(name)
            if self._ranks.rank:
                # First: who has been waited for has either said so or failed.
                (self._aside / f"{_COPIED}{self._ranks.rank}").touch()
            else:
                self._own_done.set()
                self._finish()
        except _Ended:
            pass
        except OSError as error:
            self.error = self.error or error
            if self._ranks.rank:
                self._tell_failure()
            else:
                # On a full disk, half a checkpoint only takes room from what can still be written.
                shutil.rmtree(self._aside, ignore_errors=True)
        finally:
            self.seconds = time.monotonic() - begun
            self._own_done.set()

    def _finish(self) -> None:
        marks = [self._aside / f"{_COPIED}{rank}" for rank in range(1, self._ranks.world)]
        while not self._all_done.is_set() and not all(mark.exists() for mark in marks):
            if failed := next(self._aside.glob(f"{_FAILED}*"), None):
                rank = failed.name.removeprefix(_FAILED)
                raise OSError(f"rank {rank} could not write: {failed.read_text()}")
            self._pause()
        if self.error is not None:
            raise self.error
        for name in file_names(self._on_node):
            if name not in self._own and not (self._aside / name).exists():
                self._copy(name)
        for mark in self._aside.glob(".*"):
            mark.unlink()
        put_in_place(self._scratch, self.step)
        drop_the_oldest(self._scratch)

    def _tell_failure(self) -> None:
        """On a full disk, once there is room for an empty file; tried once whoever waits."""
        with suppress(OSError):
            for name in self._own:
                (self._aside / name).unlink(missing_ok=True)
        self._own_done.set()
        while True:
            with suppress(OSError):
                (self._aside / f"{_FAILED}{self._ranks.rank}").write_text(str(self.error))
                return
            if self._all_done.is_set() or self._ended.is_set():
                return
            time.sleep(_POLL_S)

    def _pause(self) -> None:
        if self._ended.is_set():
            raise _Ended
        time.sleep(_POLL_S)

    def _copy(self, name: str) -> None:
        block = memoryview(bytearray(_BLOCK))
        source, target = self._on_node / name, self._aside / name
        with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
            while count := reading.readinto(block):
                if self._ended.is_set():
                    raise _Ended
                left = block[:count]
                while left:
                    left = left[writing.write(left) :]
            os.fsync(writing.fileno())
        target.chmod(source.stat().st_mode & 0o777)
