"""Ways to spread a model over ranks beside one another: seconds of a step, peak memory of a rank.

    python -m benchmarks.sharding [--model 10m|135m|1.1b|...] [--ranks 2] [--steps 5] [--rows 4]
        [--shardings none,zero1,zero2,zero3,fsdp] [--compile] [--write]

SFT of the same model on the same rows. The ranks of every way are started first and take their
steps in turn, one way at a time: what else the machine does meets all of them alike. Seconds are
those of the slowest rank: on the CPU of its processor, so that waiting counts nothing. `ratio` is
the median over these rounds of a way's seconds as a share of those of the first way that ran. On
the CPU, memory is what a rank has beyond what it had before there was a model; on a GPU, what torch
has allocated. A GPU is shared by all ranks, which then meet over gloo: that says nothing of the
time that several GPUs would take. A way that fails, or whose library is missing, is recorded with
the reason. `--write` records the result in results/sharding.json, by hardware, model and ranks.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import records
from benchmarks.workloads import SHAPES, load_at_random, make_model, sequences
from stages.context import Context, ShareDone
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.engines.processes.ranks import Ranks, join
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.loop import Plan, train
from stages.learning.imitation import imitation

RESULTS = records.RESULTS / "sharding.json"
PATIENCE_S = 300
"""For a step; the first waits for imports, too."""
MB = 1_000_000


@dataclass(frozen=True)
class Options:
    """What is the same for every way."""

    model: str
    ranks: int
    device: str
    precision: str
    micro_tokens: int
    rows: int
    steps: int
    compile: bool


class Turns(Context):
    """Takes a step when it is told to, and says what the step took; the first one warms up."""

    told: Any
    began: float = 0.0
    before_model: int = 0
    until: int = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        seconds = self.now() - self.began
        memory = self.peak() - self.before_model
        self.told.send({"seconds": seconds, "peak_mb": round(memory / MB)})
        if step < self.until:
            self.told.recv()
        if step == 1:
            self.reset_peak()
        self.began = self.now()

    def now(self) -> float:
        if not self.device.startswith("cuda"):
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> int:
        if self.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024

    def reset_peak(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def main() -> None:
    options, shardings, to_file = options_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        make_model(options.model, Path(folder) / "model", weights=False)
        ways = measure(shardings, options, Path(folder))
    result = {
        "model": options.model,
        "weights": sum(p.numel() for p in _shape_of(options.model)),
        "ranks": options.ranks,
        "precision": options.precision,
        "micro_tokens": options.micro_tokens,
        "rows_a_step": options.rows,
        "steps": options.steps,
        "compile": options.compile,
        "ways": ways,
        "hardware": records.hardware(options.device),
        "versions": records.versions("torch", "transformers", "deepspeed"),
    }
    print(json.dumps(result, indent=2))
    if to_file:
        compiled = " compiled" if options.compile else ""
        key = f"{result['hardware']}: {options.model} on {options.ranks} ranks{compiled}"
        records.add(RESULTS, key, result)


def options_of(words: list[str]) -> tuple[Options, list[Sharding], bool]:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="10m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--precision", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--micro-tokens", type=int, default=16_384 if on_gpu else 256)
    parser.add_argument("--rows", type=int, default=4, help="in an optimizer step")
    parser.add_argument("--steps", type=int, default=5, help="timed, after one that warms up")
    parser.add_argument("--shardings", default="none,zero1,zero2,zero3,fsdp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = vars(parser.parse_args(words))
    shardings = [Sharding(name) for name in given.pop("shardings").split(",")]
    to_file = given.pop("write")
    return Options(**given), shardings, to_file


def _shape_of(model: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SHAPES[model])).parameters()


def measure(shardings: list[Sharding], options: Options, folder: Path) -> dict[str, Any]:
    """By the name of the way."""
    found: dict[str, Any] = {}
    ways = []
    for sharding in shardings:
        if sharding.value.startswith("zero") and find_spec("deepspeed") is None:
            found[sharding.value] = {"failed": "DeepSpeed is not installed"}
        else:
            ways.append(Way(sharding, options, folder))
    try:
        for _ in range(options.steps + 1):
            for way in ways:
                way.take_step()
    finally:
        for way in ways:
            way.end()
    running = [way for way in ways if not way.failed]
    for way in ways:
        found[way.name] = way.result(running[0].seconds) if way in running else way.failure()
    return {sharding.value: found[sharding.value] for sharding in shardings}


class Way:
    """The ranks of one way, each a process."""

    def __init__(self, sharding: Sharding, options: Options, folder: Path) -> None:
        self.name = sharding.value
        self.folder = folder / self.name
        self.folder.mkdir()
        self.failed = ""
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self._begun = False
        spawn = multiprocessing.get_context("spawn")
        port = _free_port()
        self._told, self._ranks = [], []
        for rank in range(options.ranks):
            ours, theirs = spawn.Pipe()
            words = (sharding, options, self.folder, rank, port, theirs)
            process = spawn.Process(target=one_rank, args=words, daemon=True)
            process.start()
            theirs.close()
            self._told.append(ours)
            self._ranks.append(process)

    def take_step(self) -> None:
        """All its ranks take one; the first has begun when they were started."""
        if self.failed:
            return
        try:
            if self._begun:
                for told in self._told:
                    told.send("go")
            reports = []
            for told in self._told:
                if not told.poll(PATIENCE_S):
                    raise TimeoutError(f"no step within {PATIENCE_S} s")
                reports.append(told.recv())
        except (EOFError, OSError) as error:
            self.failed = str(error) or "a rank has ended"
            return
        if self._begun:
            self.seconds.append(max(report["seconds"] for report in reports))
            self.peaks.append(max(report["peak_mb"] for report in reports))
        self._begun = True

    def result(self, others: list[float]) -> dict[str, Any]:
        ratios = [own / other for own, other in zip(self.seconds, others, strict=True)]
        return {
            "step_seconds": round(statistics.median(self.seconds), 3),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(ratio, 2) for ratio in ratios],
            "peak_mb": max(self.peaks),
            "met_over": (self.folder / "backend").read_text(encoding="utf-8"),
        }

    def failure(self) -> dict[str, str]:
        said = (self.folder / "log-0").read_text(encoding="utf-8").strip().splitlines()
        return {"failed": said[-1][:300] if said else self.failed}

    def end(self) -> None:
        for process in self._ranks:
            process.join(5)
            process.kill()
            process.join()


def one_rank(
    sharding: Sharding, options: Options, folder: Path, rank: int, port: int, told: Any
) -> None:
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    ctx = Turns(
        stage="benchmark",
        key=None,
        seed=17,
        folder=folder,
        device="cuda:0" if options.device == "cuda" else options.device,
        rank=rank,
        world=options.ranks,
        heartbeats=folder / "heartbeats",
        sharding=sharding,
        micro_tokens=options.micro_tokens,
        compile=options.compile,
        checkpoint_seconds=1e9,
    )
    ctx.told = told
    ctx.until = options.steps + 1
    assert ctx.heartbeats is not None
    ctx.heartbeats.mkdir(exist_ok=True)
    try:
        with join(ctx) as ranks:
            fit(ctx, ranks, options)
    except ShareDone:
        return


def fit(ctx: Turns, ranks: Ranks, options: Options) -> None:
    # What a library takes is not what a model takes.
    if ctx.sharding is Sharding.FSDP:
        importlib.import_module("stages.engines.training.fsdp")
    elif ctx.sharding is not Sharding.NONE:
        from stages.engines.processes.deepspeed_engine import connect

        connect(ctx)
    if not ctx.device.startswith("cuda"):
        ctx.reset_peak()
        ctx.before_model = ctx.peak()
    precision = Precision(options.precision)
    how = Optimization(learning_rate=1e-5, max_grad_norm=1.0, precision=precision)
    model = load_at_random(ctx.folder.parent / "model", ctx.loads_on)
    learner = open_learner(ctx, ranks, model, how)
    if ctx.rank == 0:
        backend = dist.get_backend() if dist.is_initialized() else "nothing"
        (ctx.folder / "backend").write_text(backend, encoding="utf-8")
    num_rows = options.rows * (options.steps + 1)
    data = sequences(options.model, num_rows)
    work = imitation(model, data.prompts, data.chosen, ctx.device, str)
    plan = Plan(num_rows, options.rows, 1, seed=17, learning_rate=lambda *_: 1.0)
    train(ctx, {"policy": learner}, plan, work, shown=["loss"], ranks=ranks)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
