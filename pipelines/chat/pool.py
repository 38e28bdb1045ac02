"""The engines that a server has at hand: one for each policy that was asked, a few at a time.

An engine is started when its policy is first asked, and ends when nobody has asked for a while, or
when another policy needs its place. What answers under a name is always the policy that the name
means now: an engine belongs to the hash of its files.
"""

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.chat.engine import Engine
from pipelines.chat.policies import Policy
from pipelines.config.params import load_params

MOST = 2
"""Each holds a model in memory."""
IDLE_S = 300.0
LOOKS = 10
"""How often idleness is looked for, in the time that an engine may be idle."""


@dataclass
class _Place:
    name: str
    users: int = 0
    engine: Engine | None = None
    last_used: float = 0.0
    starting: threading.Lock = field(default_factory=threading.Lock)


class Engines:
    """The places of engines, by the hash of the policy's files."""

    def __init__(self, repository: Repository, idle_s: float = IDLE_S) -> None:
        self._repository = repository
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._sweeper: threading.Thread | None = None
        atexit.register(self.close)

    @contextmanager
    def lent(self, policy: Policy) -> Iterator[Engine]:
        """The policy's engine, started if it is not there; LockstepError if it cannot be."""
        place = self._take_place(policy)
        try:
            with place.starting:
                if place.engine is None or not place.engine.is_alive:
                    if place.engine is not None:
                        place.engine.close()
                    place.engine = Engine(policy, load_params(self._repository.root))
            yield place.engine
        finally:
            with self._lock:
                place.users -= 1
                place.last_used = time.monotonic()
                is_unused = place.engine is None and not place.users
                if is_unused and self._places.get(policy.artifact.hash) is place:
                    del self._places[policy.artifact.hash]

    def names(self) -> list[str]:
        """The policies whose engines are there."""
        with self._lock:
            return [place.name for place in self._places.values() if place.engine is not None]

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            places = list(self._places.values())
            self._places.clear()
        for place in places:
            if place.engine is not None:
                place.engine.close()

    def _take_place(self, policy: Policy) -> _Place:
        leaving: _Place | None = None
        with self._lock:
            place = self._places.get(policy.artifact.hash)
            if place is None:
                if len(self._places) >= MOST:
                    leaving = self._longest_idle()
                place = self._places[policy.artifact.hash] = _Place(policy.name)
            place.users += 1
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep, daemon=True)
                self._sweeper.start()
        if leaving is not None and leaving.engine is not None:
            leaving.engine.close()
        return place

    def _longest_idle(self) -> _Place:
        """Taken out of its place, for another."""
        idle = {key: place for key, place in self._places.items() if not place.users}
        if not idle:
            names = " and ".join(place.name for place in self._places.values())
            raise LockstepError(
                f"{names} are answering just now, and {MOST} policies are held at a time: stop "
                "one of them, or wait for its answer"
            )
        return self._places.pop(min(idle, key=lambda key: idle[key].last_used))

    def _sweep(self) -> None:
        while True:
            time.sleep(self._idle_s / LOOKS)
            with self._lock:
                late = time.monotonic() - self._idle_s
                over = [
                    key
                    for key, place in self._places.items()
                    if not place.users and place.last_used < late
                ]
                places = [self._places.pop(key) for key in over]
                ended = not self._places
                if ended:
                    self._sweeper = None
            for place in places:
                if place.engine is not None:
                    place.engine.close()
            if ended:
                return
