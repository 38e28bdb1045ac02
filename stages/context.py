"""The context of a stage: seed, scratch, progress, metrics and stopping.

A stage is `run(config, inputs, out, ctx) -> metrics`. It reads only `inputs`, writes only `out`,
keeps resume state only in `ctx.scratch`, draws randomness only from `ctx.seed`, and asks
`ctx.should_stop()` at step boundaries. Everything it says about itself goes through append-only
files that somebody else reads: a job opens no database.
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.contracts.sharding import Offload, Sharding
from stages.progress import Pace
from stages.signature import Known, signature_of

if TYPE_CHECKING:
    from stages.engines.processes.ranks import Ranks


class Stopped(Exception):
    """The stage was asked to stop and did so at a step boundary; its scratch allows it to go on."""


class ShareDone(Exception):
    """This process has done its share of the stage; another one writes the outputs."""


class StageError(Exception):
    """Something a user can fix: the message names the file, key or row and says what to do."""


class RankLost(StageError):
    """A rank did not come to where the others wait for it; the message names it."""


@dataclass(frozen=True)
class LocalScratch:
    """A folder on the node's own disk, at the same path on every node of the job."""

    folder: Path
    make_room: Callable[[int], None]
    """Have so many bytes free in it; OSError where that cannot be."""
    num_nodes: int = 1


@dataclass
class Context:
    """One attempt at running a stage."""

    stage: str
    """The stage's address, `policy_update@iter_001`."""
    key: str | None
    """The iteration or policy that the stage is bound to."""
    seed: int
    """The run's seed."""
    folder: Path
    """The job's folder: metrics.jsonl, progress.json and tables/ are written here."""
    device: str = "cpu"
    """Where tensors live."""
    micro_tokens: int = 8192
    """Tokens in one forward pass. Never changes a result beyond rounding."""
    compile: bool = False
    """Whether models are compiled. Changes results by rounding at most."""
    checkpoint_activations: bool = False
    """Whether activations are computed twice, to save memory. Changes no result."""
    sharding: Sharding = Sharding.NONE
    """What of a model that learns is spread over the ranks."""
    offload: Offload = Offload.NONE
    """What of that waits in the host's memory."""
    tensor_parallel: int = 1
    """GPUs that vLLM spreads each matrix over: of one process, or one of each of so many ranks.
    Changes results by rounding at most."""
    generator_memory: float = 0.9
    """Share of a GPU's memory that vLLM may take, for weights and cache."""
    sequence_parallel: int = 1
    """Neighbouring ranks that share each row of tokens."""
    checkpoint_seconds: float = 30.0
    """Seconds between two checkpoints: the work that a kill may cost."""
    rank: int = 0
    """Rank of this process among those of the job; rank 0 logs and writes for all."""
    world: int = 1
    """Number of ranks that train together: the first ones."""
    samplers: int = 0
    """Number of ranks after these that only sample."""
    collective_seconds: float = 600.0
    """Timeout of a collective, in seconds."""
    heartbeats: Path | None = None
    """Folder of this start of the job, where ranks write heartbeats and how far they are."""
    ranks: "Ranks | None" = None
    """The ranks, while they are joined."""
    shard: int = 0
    """Number of this shard: shards share out a stage's units of work, each on its own."""
    num_shards: int = 1
    local: LocalScratch | None = None
    """Where checkpoints are written first; they count once they are in the scratch, too."""
    parts: dict[Path, list[Any]] | None = None
    """Keeps results of units of work in memory, not in the scratch: they end with the process."""
    graph: Sequence[Mapping[str, Any]] = ()
    """For a stage that wants it: the nodes upstream with the hashes of their outputs."""
    written: dict[Path, Known] = field(default_factory=dict)
    """Outputs whose hash is known to whoever wrote them; see `wrote`."""
    _stop: list[bool] = field(default_factory=lambda: [False])
    _unwritten: list[str] = field(default_factory=list)
    _pace: Pace = field(default_factory=Pace)

    @property
    def scratch(self) -> Path:
        """Resume state lives here and nowhere else."""
        path = self.folder / "scratch"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def only_samples(self) -> bool:
        """Whether this rank is one of the samplers."""
        return self.rank >= self.world

    @property
    def ranks_per_sampler(self) -> int:
        """Neighbouring ranks that sample as one, with a vLLM over their GPUs."""
        return self.tensor_parallel if (self.samplers or self.world) > 1 else 1

    @property
    def loads_on(self) -> str:
        """Where a model that is to learn is loaded; one that is spread comes from the CPU."""
        return "cpu" if self.sharding is not Sharding.NONE else self.device

    def request_stop(self) -> None:
        """Ask the stage to end at its next step boundary."""
        self._stop[0] = True

    def should_stop(self) -> bool:
        """Whether somebody asked; a stage then saves its scratch and raises `Stopped`."""
        return self._stop[0]

    def should_stop_alone(self) -> bool:
        """The same within a computation that ranks share: they stop together, at its end."""
        return self.should_stop() and self.world == 1

    def wrote(self, path: Path, md5: str) -> None:
        """Say the md5 of an output file, hashed over its bytes as they were written.

        Nobody reads the file again to hash it, unless it is touched after this call: it must have
        its last bytes, its mode and its place below `out`. Only what rank 0 says counts; it may
        speak for files that other ranks have written.
        """
        if not re.fullmatch("[0-9a-f]{32}", md5):
            raise ValueError(f"{path}: {md5!r} is no md5")
        signature = signature_of(path)
        if signature is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self.written[path] = Known(signature, md5)

    def wrote_all(self, hashes: Mapping[Path, str]) -> None:
        """The same of several files."""
        for path, md5 in hashes.items():
            self.wrote(path, md5)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics, once per step; `resume_at` drops those past a checkpoint.

        A row that cannot be written, as on a full disk, waits for the next one or `write_metrics`.
        """
        if self.rank:
            return
        self._unwritten.append(_metrics_line(step, metrics))
        with suppress(OSError):
            self.write_metrics()

    def write_metrics(self) -> None:
        """Write the rows that wait; OSError where that is still impossible."""
        if not self._unwritten:
            return
        data = "".join(self._unwritten).encode()
        with (self.folder / "metrics.jsonl").open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
            except OSError:
                file.truncate(before)  # half a line would spoil the next one, too
                raise
        self._unwritten.clear()

    def resume_at(self, step: int, history: Sequence[Mapping[str, float]] = ()) -> None:
        """Bring the metrics to exactly the steps up to `step`: the others are computed again.

        `history` has the metrics of these steps; rows that the file has lost are written from it.
        """
        path = self.folder / "metrics.jsonl"
        if self.rank:
            return
        self._unwritten.clear()
        there: dict[int, str] = {}
        for line in (
            path.read_text(errors="replace", encoding="utf-8").splitlines() if path.exists() else ()
        ):
            if (logged := _logged_step(line)) is not None and logged <= step:
                there.setdefault(logged, line + "\n")
        for lost, metrics in enumerate(history[:step], 1):
            if lost not in there:
                there[lost] = _metrics_line(lost, metrics)
        aside = path.with_suffix(".tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.write("".join(there[logged] for logged in sorted(there)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def progress(self, done: int, total: int, phase: str = "", **numbers: float) -> None:
        """Say how far the stage is, with the two or three numbers that matter for it.

        `phase` is what is counted, where a stage counts more than one thing.
        """
        report = None if self.rank else self._pace.report(done, total, phase, numbers)
        if report is None:
            return
        aside = self.folder / f"progress.json.{self.shard}.tmp"
        # Nothing depends on it: on a full disk, nobody hears how far the stage is.
        with suppress(OSError):
            aside.write_text(json.dumps(report), encoding="utf-8")
            os.replace(aside, self.folder / "progress.json")
            if line := self._pace.line(report):
                print(line, flush=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a small table, such as sample generations, for comparing runs."""
        if self.rank:
            return
        folder = self.folder / "tables"
        folder.mkdir(exist_ok=True)
        aside = folder / f"{name}.json.{self.shard}.tmp"
        aside.write_text(json.dumps(list(rows), ensure_ascii=False), encoding="utf-8")
        os.replace(aside, folder / f"{name}.json")


def _metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    return json.dumps({"step": step, "time": time.time(), "metrics": dict(metrics)}) + "\n"


def _logged_step(line: str) -> int | None:
    """The step of a metrics line; None of one that is torn."""
    try:
        row = json.loads(line)
        return int(row["step"]) if isinstance(row["metrics"], dict) else None
    except (ValueError, KeyError, TypeError):
        return None
