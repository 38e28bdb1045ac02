"""Heartbeats of ranks: how far each is, and what the others conclude from its silence.

Once a second a thread of each rank writes `rank-R.json` into a folder of this start of the job. The
same thread ends the process when a collective has kept it waiting for too long: whoever hangs in a
backend's C++ can raise nothing. Always true:
- Whoever gives up says which rank it waited for, in its log and in `failure-R.json`; those that
  give up later repeat that, so all name the same culprit.
- A rank counts as silent if its heartbeat does not change while this one looks on. Clocks of two
  hosts are compared only to say in a message how old a heartbeat is.
- Time in which the job is suspended does not count as waiting.
- Ranks that meet in the same collectives are compared by how many they have come to; a rank may
  also wait for others that are at work on their own, and does so while they send heartbeats.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""
LOOK_S = 4.0
"""How long a heartbeat has to stay the same for its rank to count as silent."""
NAMED = 8
"""At most so many ranks are named in one message."""

ByRank = dict[int, Mapping[str, Any]]


class Heartbeats:
    """This rank's own heartbeats, and its view of those of the others."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        timeout_s: float,
        together: range | None = None,
    ) -> None:
        """`together`: the ranks that come to the same collectives as this one, if not all."""
        self.at = "the start"
        """Where in its work this rank is, for messages."""
        self.rank = rank
        self._folder, self._world = folder, world
        self._timeout_s = timeout_s
        self._together = together or range(world)
        self._host = socket.gethostname()
        self._waits = 0
        self._collectives = 0
        """Those of the waits that the ranks which are together all come to."""
        self._waiting = self._patient = False
        self._beat = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="heartbeats", daemon=True)

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_heartbeat()
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def waiting(self, *, patient: bool = False, all_come: bool = True) -> Iterator[None]:
        """Around each collective, with nothing in it that takes time on its own.

        `patient`: the others may be at work for as long as they like, and are lost if they send no
        heartbeats for too long. Unless `all_come` of those that are together, it does not say how
        far this rank is.
        """
        self._waits += 1
        self._collectives += all_come
        self._waiting, self._patient = True, patient
        try:
            yield
        finally:
            self._waiting = False

    def write_failure(self, error: str, *, stopped: bool = False) -> None:
        """Say why this rank ends, so that the others need not wait for it."""
        known = {"rank": self.rank, "host": self._host, "error": error, "time": time.time()}
        self._write(f"failure-{self.rank}", {**known, "stopped": stopped})

    def left(self) -> Mapping[str, Any] | None:
        """What a rank that has ended said of it: its `error`, and whether it was `stopped`."""
        for path in sorted(self._folder.glob("failure-*.json")):
            if failure := _read(path):
                return failure
        return None

    def failure(self) -> str | None:
        """Why another rank ended, where it said so."""
        left = self.left()
        return str(left["error"]) if left else None

    def watch(self) -> "Watch":
        """For ranks that are waited for outside a collective."""
        return Watch(self, self._timeout_s)

    def heartbeats_of(self, ranks: Sequence[int]) -> ByRank:
        """The last of each rank that has sent one."""
        read = {rank: _read(self._folder / f"rank-{rank}.json") for rank in ranks}
        return {rank: heartbeat for rank, heartbeat in read.items() if heartbeat}

    def find_lost(self) -> str | None:
        """After a broken connection: the error of the rank that caused it, if one can be found."""
        before = self._heartbeats()
        for _ in range(round(LOOK_S / BEAT_S)):
            if error := self.failure():
                return error
            time.sleep(BEAT_S)
        now = self._heartbeats()
        return self.failure() or _tell(
            [
                f"{_name(rank, now)} was lost at {self.at}; {_last_heartbeat(now[rank])}"
                for rank in self._silent(before, now)
                if rank in now
            ]
        )

    def _keep(self) -> None:
        """Write heartbeats; end the process if it waits in one collective for too long."""
        number, waited, last = 0, 0.0, time.monotonic()
        before: ByRank | None = None
        watch = self.watch()
        while not self._ended.wait(BEAT_S):
            now = time.monotonic()
            passed, last = min(now - last, 2 * BEAT_S), now
            self._write_heartbeat()
            if not self._waiting or number != self._waits:
                number, waited, before = self._waits, 0.0, None
                watch = self.watch()
                continue
            waited += passed
            if waited > LOOK_S and (error := self.failure()):
                self._give_up(number, error)
            elif self._patient:
                # One rank looks at all, and all look at that one: not each at each.
                if lost := watch.look([0] if self.rank else self._others(), self.at):
                    self._give_up(number, lost)
            elif waited > self._timeout_s and before is None:
                before = self._heartbeats()
            elif before is not None and waited > self._timeout_s + LOOK_S:
                self._give_up(number, self._late(before, self._heartbeats(), waited))

    def _give_up(self, number: int, error: str) -> None:
        if self._waiting and number == self._waits:
            self.write_failure(error)
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _late(self, before: ByRank, now: ByRank, waited: float) -> str:
        """Who is waited for: silent ranks, else those that live but have come least far."""
        mine = self._collectives
        silent = self._silent(before, now)
        come_to = {rank: now[rank]["collectives"] for rank in self._together if rank in now}
        least = min(come_to.values(), default=mine)
        behind = [r for r in come_to if come_to[r] == least < mine and r != self.rank]
        late = silent or behind
        num_waiting = len(set(self._together) - set(late))
        ranks = "1 rank has" if num_waiting == 1 else f"{num_waiting} ranks have"
        where = f"{self.at}, where {ranks} waited for {waited:.0f} s"
        return _tell(
            [
                f"{_name(rank, now)} has not come to {where}; " + _last_heartbeat(now.get(rank))
                for rank in late
            ]
        ) or (
            f"all {len(self._together)} ranks came to {self.at}, but what they exchange there has "
            f"not arrived in {waited:.0f} s: look at the network between their hosts"
        )

    def _silent(self, before: ByRank, now: ByRank) -> list[int]:
        """Ranks whose heartbeat is missing or has not changed between two looks."""

        def beat(heartbeats: ByRank, rank: int) -> int | None:
            return heartbeats[rank]["beat"] if rank in heartbeats else None

        return [rank for rank in self._others() if beat(before, rank) == beat(now, rank)]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self.rank]

    def _heartbeats(self) -> ByRank:
        return self.heartbeats_of(range(self._world))

    def _write_heartbeat(self) -> None:
        self._beat += 1
        heartbeat = {
            "rank": self.rank,
            "host": self._host,
            "pid": os.getpid(),
            "beat": self._beat,
            "collectives": self._collectives,
            "at": self.at,
            "time": time.time(),
        }
        self._write(f"rank-{self.rank}", heartbeat)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        aside = self._folder / f".{name}.tmp"
        # A file system that fails for a moment must neither end the watch nor hide an error.
        with suppress(OSError):
            aside.write_text(json.dumps(content), encoding="utf-8")
            os.replace(aside, self._folder / f"{name}.json")


class Watch:
    """How long some ranks have been silent, by what one that waits for them has seen.

    As long as they send heartbeats they may take their time.
    """

    def __init__(self, heartbeats: Heartbeats, timeout_s: float) -> None:
        self._heartbeats, self._timeout_s = heartbeats, timeout_s
        self._last = time.monotonic()
        self._beats: dict[int, int | None] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, ranks: Sequence[int], where: str) -> str | None:
        """To be called time and again; who of them has been silent for too long, if one has."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * BEAT_S), now
        heartbeats = self._heartbeats.heartbeats_of(ranks)
        lost = []
        for rank in ranks:
            beat = heartbeats[rank]["beat"] if rank in heartbeats else None
            silent = self._silent_s.get(rank, 0.0) + passed if beat == self._beats.get(rank) else 0
            self._beats[rank], self._silent_s[rank] = beat, silent
            if silent > self._timeout_s:
                last = _last_heartbeat(heartbeats.get(rank))
                lost.append(f"{_name(rank, heartbeats)} has not come to {where}; {last}")
        return _tell(lost)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


def _name(rank: int, heartbeats: ByRank) -> str:
    return f"rank {rank} on {heartbeats[rank]['host']}" if rank in heartbeats else f"rank {rank}"


def _last_heartbeat(heartbeat: Mapping[str, Any] | None) -> str:
    if heartbeat is None:
        return "it has sent no heartbeat"
    age = max(0.0, time.time() - heartbeat["time"])
    return f"its last heartbeat, at {heartbeat['at']}, was {age:.0f} s ago"


def _tell(ranks: list[str]) -> str | None:
    more = [f"and {len(ranks) - NAMED} more ranks"] if len(ranks) > NAMED else []
    return "; ".join(ranks[:NAMED] + more) or None
