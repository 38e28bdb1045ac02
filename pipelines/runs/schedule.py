"""Which of a plan's stale stages may start now."""

from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter

from pipelines.dvc_repo.plan import PlannedStage


class Schedule:
    """A stage starts when those before it have ended, and fewer than `parallel` others run."""

    def __init__(self, plan: Iterable[PlannedStage], parallel: int) -> None:
        stale = {stage.address: stage.upstream for stage in plan if stage.stale}
        self.upstream = {address: stale.keys() & set(above) for address, above in stale.items()}
        self._sorter = TopologicalSorter(self.upstream)
        self._sorter.prepare()
        self._parallel = parallel
        self._ready: list[str] = []
        self._num_running = 0

    def __len__(self) -> int:
        return len(self.upstream)

    @property
    def is_over(self) -> bool:
        return not self._sorter.is_active()

    def start(self) -> Iterator[str]:
        """The stages to start now; each runs until `end` is called."""
        self._ready += self._sorter.get_ready()
        while self._ready and self._num_running < self._parallel:
            self._num_running += 1
            yield self._ready.pop(0)

    def end(self, address: str) -> None:
        """Those that wait for this stage no longer do."""
        self._num_running -= 1
        self._sorter.done(address)
