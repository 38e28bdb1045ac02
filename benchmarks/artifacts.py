"""How fast ranks write, hash and read an artifact together: GB/s by the number of ranks.

    python -m benchmarks.artifacts [--gigabytes 8] [--ranks 1 2 4 8] [--folder DIR] [--record]

The ranks are processes of this machine that have the same tensors in memory: what is measured is
the way from memory to the disk, md5 and fsync included, and back, each rank its own rows, once from
the page cache and, where the machine lets one drop it, once from the disk.
"""

import argparse
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from stages.context import Context, ShareDone
from stages.engines.models.tensor_files import Form, stored_tensors, write_tensor_files
from stages.engines.processes.ranks import join
from stages.engines.training.saving import md5

GB = 1_000_000_000
ROWS, WIDTH = 4096, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    num_tensors = max(1, round(arguments.gigabytes * GB / (4 * ROWS * WIDTH)))
    one = torch.randn(ROWS, WIDTH)
    tensors = {f"layer.{i}": one for i in range(num_tensors)}
    by_ranks = {str(world): measure(tensors, world, arguments.folder) for world in arguments.ranks}
    result = {
        "hardware": records.machine(),
        "gigabytes": round(num_tensors * one.nbytes / GB, 2),
        "gb_per_s_by_ranks": by_ranks,
        "versions": records.versions("torch", "safetensors"),
    }
    records.report("artifacts", result, to_file=arguments.record)


def measure(tensors: dict[str, torch.Tensor], world: int, place: Path) -> dict[str, float]:
    """GB/s of all ranks together."""
    folder = Path(tempfile.mkdtemp(dir=place))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    found: Any = fork.Queue()
    ranks = [
        fork.Process(target=one_rank, args=(tensors, rank, world, port, folder, found))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    seconds = found.get()
    for process in ranks:
        process.join()
    shutil.rmtree(folder)
    size = sum(tensor.nbytes for tensor in tensors.values()) / GB
    return {name: round(size / taken, 2) for name, taken in seconds.items()}


def one_rank(
    tensors: dict[str, torch.Tensor], rank: int, world: int, port: int, folder: Path, found: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / "out").mkdir(exist_ok=True)
    ctx = Context("benchmark", None, 0, folder, rank=rank, world=world, heartbeats=folder / "beats")
    forms = {name: Form.of(tensor) for name, tensor in tensors.items()}
    seconds: dict[str, float] = {}
    try:
        with join(ctx) as ranks:
            fetch = lambda name, _: tensors[name]  # noqa: E731

            def clocked(name: str, work: Any) -> None:
                ranks.agree(name, False)
                started = time.perf_counter()
                work()
                ranks.agree(name, False)
                seconds[name] = time.perf_counter() - started

            write = lambda: write_tensor_files(  # noqa: E731
                folder / "out", "model", forms, fetch, ranks, new_hash=md5
            )
            clocked("write_and_hash", write)
            clocked("read_from_page_cache", lambda: read(folder / "out", rank, world))
            if all(ranks.gather(rank > 0 or drop_page_cache())):
                clocked("read_from_disk", lambda: read(folder / "out", rank, world))
    except ShareDone:
        return
    found.put(seconds)


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
