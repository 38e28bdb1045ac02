"""Seconds of the parts of SFT on a model that takes long to read and to write; GB/s of these.

    python benchmarks/large_stage.py [--model 8b] [--steps 4] [--rows 128] [--write]

The stage itself, in one process, as a job runs it: with all weights, in bfloat16 (float32 without
a GPU), activations computed twice and moments on the host. The base is a sharded bfloat16 folder;
what comes out is one of float32 weights, which is written and hashed on the way. Before the base
is read, and before the result is read again, the machine drops its cache of files where it lets
one do so: `read_from` says. `hash_seconds` is what a sampler takes to know which policy it has
loaded. The first step is apart: it gets the moments' memory. `--write` records the result in
results/large_stage.json, by model.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import records, workloads
from benchmarks.artifacts import drop_page_cache
from benchmarks.online import replace
from benchmarks.peaks import peaks
from benchmarks.step_clock import StepClock
from stages import sft
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload
from stages.data import schema
from stages.data.artifacts import write_parquet
from stages.engines.models.folders import folder_hash, load_policy

RESULTS = records.RESULTS / "large_stage.json"
GB = 1_000_000_000
PARTS = {
    "open_for_training": "load_seconds",
    "fresh_learner": "learner_seconds",
    "train": "train_seconds",
    "save_learner": "write_and_hash_seconds",
}
"""What the stage calls, and what its seconds are recorded as."""


def main() -> None:
    options = options_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    print(json.dumps(result, indent=2))
    if options.write:
        records.add(RESULTS, options.model, result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=workloads.SHAPES, default="8b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=128, help="in an optimizer step")
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(words)


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    device, precision = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    bound = bind("sft", Params.model_validate(changes(options, precision)))
    inputs = {name: root / path for name, path in bound.inputs.items()}
    outs = {name: root / path for name, path in bound.outs.items()}
    for path in (*inputs.values(), *outs.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
    make_inputs(options, inputs)
    # In the cache of files is only what has been read or written since.
    read_from = "disk" if drop_page_cache() else "page cache"
    ctx = context(root / "job", device, options.micro_tokens)
    seconds: dict[str, float] = {}
    with ExitStack() as changed, peaks() as memory:
        for called, name in PARTS.items():
            replace(changed, sft, called, clocked(getattr(sft, called), seconds, name))
        with clock(seconds, "stage_seconds"):
            sft.run(bound.config, inputs, outs, ctx)
    gc.collect()
    with clock(seconds, "hash_seconds"):
        folder_hash(outs["model"], Precision(precision))
    drop_page_cache()
    with clock(seconds, "read_seconds"):
        load_policy(outs["model"], device)
    base, model = gigabytes(inputs["base"]), gigabytes(outs["model"])
    steps = ctx.seconds(1)
    return {
        "model": options.model,
        "base_gigabytes": round(base, 2),
        "gigabytes": round(model, 2),
        "files": len(list(outs["model"].glob("*.safetensors"))),
        "read_from": read_from,
        **{name: round(value, 2) for name, value in seconds.items()},
        "step_seconds": round(statistics.median(steps), 3),
        "steps_seconds": [round(value, 3) for value in steps],
        "gb_per_s": {
            "load": round(base / seconds["load_seconds"], 2),
            "write_and_hash": round(model / seconds["write_and_hash_seconds"], 2),
            "hash": round(model / seconds["hash_seconds"], 2),
            "read": round(model / seconds["read_seconds"], 2),
        },
        **memory,
        "settings": {name: value for name, value in vars(options).items() if name != "write"},
        "hardware": records.hardware(device),
        "machine": records.machine(),
        "versions": records.versions("torch", "transformers", "safetensors"),
    }


def changes(options: argparse.Namespace, precision: str) -> dict[str, Any]:
    of_sft = {"epochs": 1, "batch_size": options.rows, "learning_rate": 1e-6}
    return {
        "precision": precision,
        "model": {"max_length": workloads.MAX_LENGTH},
        "sft": of_sft,
    }


def make_inputs(options: argparse.Namespace, inputs: dict[str, Path]) -> None:
    workloads.make_model(options.model, inputs["base"], dtype="bfloat16")
    data = workloads.sequences(options.model, options.rows * options.steps)
    rows = [
        {
            "prompt_id": f"{index:016x}",
            "prompt": "",
            "completion": "",
            "answer": None,
            "extra": "{}",
            "prompt_ids": prompt,
            "completion_ids": completion,
            "loss_mask": None,
        }
        for index, (prompt, completion) in enumerate(zip(data.prompts, data.chosen, strict=True))
    ]
    write_parquet(inputs["demonstrations"], rows, schema.DemonstrationRow)


def context(folder: Path, device: str, micro_tokens: int) -> StepClock:
    folder.mkdir()
    return StepClock(
        stage="sft",
        key=None,
        seed=17,
        folder=folder,
        device=device,
        micro_tokens=micro_tokens,
        checkpoint_activations=True,
        offload=Offload.OPTIMIZER,
        checkpoint_seconds=1e9,
    )


def clocked(work: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        with clock(seconds, name):
            return work(*arguments, **options)

    return timed


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Until what the GPU was asked to do is done."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - began


def gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GB


if __name__ == "__main__":
    main()
