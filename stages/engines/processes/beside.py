"""Passes that wait for others, filled in a thread while this one computes.

A judge or a reward function works in another process or on another machine, and the models of the
stage need not wait for it. Each pass has its own parts, so nothing depends on who was faster. Where
either side fails or is stopped, the other is, too: nothing goes on unattended.
"""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from stages.context import Context
from stages.engines.processes.parts import Pass, fill


class Beside:
    """What is computed beside a stage's own work."""

    def __init__(self, ctx: Context) -> None:
        self._ended = threading.Event()
        self.ctx = copy.copy(ctx)
        """For passes that are filled beside: it stops when the stage does, and when it fails."""
        self.ctx.should_stop = lambda: self._ended.is_set() or ctx.should_stop()  # type: ignore[method-assign]
        # The stage speaks for both: a line of progress has one total.
        self.ctx.progress = lambda *_, **__: None  # type: ignore[method-assign]

    @contextmanager
    def fill(self, *passes: Pass) -> Iterator[None]:
        """Fill the passes while the body runs; they are done when it ends."""
        if not passes:
            yield
            return
        with ThreadPoolExecutor(1) as thread:
            filling = thread.submit(fill, self.ctx, *passes)
            try:
                yield
            except BaseException:
                self._ended.set()
                raise
            filling.result()
