"""How fast ranks write, hash and read an artifact together: GB a second by the number of ranks.

    python -m benchmarks.artifacts [--gigabytes 8] [--ranks 1 2 4 8] [--folder DIR] [--record]

The ranks are processes of this machine that have the same tensors in memory. What is measured is
the way from memory to the disk, with fsync: files hashed as they are written, as stages do it, then
without a hash; md5 alone, by as many threads; and the way back, each rank its own rows, once from
the page cache and, where the machine lets one drop it, once from the disk. Each by the clock, and
by the processor time of all ranks, which others on the machine change little.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from stages.context import Context, ShareDone
from stages.engines.models.tensor_files import (
    THREADS,
    Form,
    stored_tensors,
    write_tensor_files,
)
from stages.engines.processes.ranks import join
from stages.engines.training.saving import md5

GB = 1_000_000_000
ROWS, WIDTH = 4096, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--keep-page-cache",
        action="store_true",
        help="do not read from the disk, for which the whole machine's page cache is dropped",
    )
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    num_tensors = max(1, round(arguments.gigabytes * GB / (4 * ROWS * WIDTH)))
    one = torch.randn(ROWS, WIDTH)
    tensors = {f"layer.{i}": one for i in range(num_tensors)}
    how = (arguments.folder, not arguments.keep_page_cache)
    measured = {str(world): measure(tensors, world, *how) for world in arguments.ranks}
    result = {
        "hardware": records.machine(),
        "gigabytes": round(num_tensors * one.nbytes / GB, 2),
        "gb_per_s_by_ranks": {world: by_clock for world, (by_clock, _) in measured.items()},
        "gb_per_processor_s_by_ranks": {world: by_cpu for world, (_, by_cpu) in measured.items()},
        "versions": records.versions("torch", "safetensors"),
    }
    print(json.dumps(result, indent=2))
    if arguments.record:
        records.add(records.RESULTS / "artifacts.json", records.machine(), result)


Rates = dict[str, float]
"""By what is done."""


def measure(
    tensors: dict[str, torch.Tensor], world: int, place: Path, drops: bool
) -> tuple[Rates, Rates]:
    """GB a second of all ranks together, and GB a second of the processors' time."""
    folder = Path(tempfile.mkdtemp(dir=place))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    found: Any = fork.Queue()
    ranks = [
        fork.Process(target=one_rank, args=(tensors, rank, world, port, folder, drops, found))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    clocked = found.get()
    for process in ranks:
        process.join()
    shutil.rmtree(folder)
    size = sum(tensor.nbytes for tensor in tensors.values()) / GB
    by_clock, by_cpu = (
        {name: round(size / taken[kind], 2) for name, taken in clocked.items()} for kind in (0, 1)
    )
    return by_clock, by_cpu


def one_rank(
    tensors: dict[str, torch.Tensor],
    rank: int,
    world: int,
    port: int,
    folder: Path,
    drops: bool,
    found: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / "out").mkdir(exist_ok=True)
    ctx = Context("benchmark", None, 0, folder, rank=rank, world=world, heartbeats=folder / "beats")
    forms = {name: Form.of(tensor) for name, tensor in tensors.items()}
    clocked: dict[str, tuple[float, float]] = {}
    try:
        with join(ctx) as ranks:
            fetch = lambda name, _: tensors[name]  # noqa: E731

            def clock(name: str, work: Any) -> None:
                ranks.agree(name, False)
                started, used = time.perf_counter(), time.process_time()
                work()
                used = time.process_time() - used
                ranks.agree(name, False)
                clocked[name] = time.perf_counter() - started, sum(ranks.gather(used))

            def write(new_hash: Any) -> None:
                write_tensor_files(folder / "out", "model", forms, fetch, ranks, new_hash=new_hash)

            clock("write", lambda: write(NoHash))
            clock("hash", lambda: hash_share(list(tensors.values())[rank::world]))
            clock("write_and_hash", lambda: write(md5))
            clock("read_from_page_cache", lambda: read(folder / "out", rank, world))
            if drops and all(ranks.gather(rank > 0 or drop_page_cache())):
                clock("read_from_disk", lambda: read(folder / "out", rank, world))
    except ShareDone:
        return
    found.put(clocked)


class NoHash:
    """What files are hashed by where only writing is to be measured."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def hash_share(tensors: Sequence[torch.Tensor]) -> None:
    """This rank's part of all tensors, by as many threads as write files."""

    def of_thread(own: Sequence[torch.Tensor]) -> None:
        digest = md5()
        for tensor in own:
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(of_thread, (tensors[thread::THREADS] for thread in range(THREADS))))


def read(folder: Path, rank: int, world: int) -> None:
    """This rank's rows of every tensor."""
    mine = torch.empty(ROWS // world, WIDTH)
    for tensor in stored_tensors(folder, "model").values():
        mine.copy_(tensor[rank * len(mine) : (rank + 1) * len(mine)])


def drop_page_cache() -> bool:
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1", encoding="utf-8")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
