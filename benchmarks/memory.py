"""Peak GPU memory of each kind of work, against the model's size and the context.

    python benchmarks/memory.py [--models 135m,1.1b,7b] [--contexts 1024,4096,16384,32768] [--write]

Each cell is the most that torch had allocated (`peak_gib`) and taken from the GPU (`reserved_gib`)
while the work was done once, with all that stays between steps: weights, float32 weights, moments.
A forward pass has one sequence of the full context (`micro_tokens` = context; a pair, for reward
model and DPO), the least that can be had: more tokens in a pass need more in proportion. A rollout
decodes 8 samples of one prompt. Nothing is compiled. What does not fit is recorded as that, and
longer contexts are then not tried.

`sleep` is what the GPU had in use with a generator awake, asleep and awake again. Without a GPU the
process's own memory is shown instead, which says only that the script runs.

`--write` records the result in benchmarks/results/memory.json, and keeps what is there of other
models, if hardware and versions are the same.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import records
from benchmarks.memory_cells import CUDA, DEVICE, KINDS, PRECISION, SLOTS, once, tokens
from benchmarks.workloads import make_model
from stages.context import StageError
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.torch_generator import TorchGenerator

RESULTS = records.RESULTS / "memory.json"
SLEEPERS = ("tiny", "135m", "1.1b")
"""Models that are small enough to be written to a folder first."""
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="135m,1.1b,7b")
    parser.add_argument("--contexts", default="1024,4096,16384,32768")
    parser.add_argument("--total", type=float, default=240, help="seconds in which cells begin")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    contexts = [int(number) for number in options.contexts.split(",")]
    result: dict[str, Any] = {
        "measured": "torch.cuda" if CUDA else "the process's own memory: there is no GPU",
        "hardware": records.hardware(DEVICE),
        "gpu_gib": round(torch.cuda.mem_get_info()[1] / GIB, 1) if CUDA else None,
        "precision": PRECISION.value,
        "slots": SLOTS,
        "versions": records.versions("torch", "transformers", "peft", "triton"),
    }
    old = records.recorded(RESULTS)
    same = all(old.get(name) == value for name, value in result.items())
    result["models"] = old["models"] if same else {}
    until = time.monotonic() + options.total
    for model in options.models.split(","):
        of_model = result["models"][model] = {"cells": []}
        began = time.monotonic()
        try:
            for cell in measured(model, contexts, until):
                of_model["cells"].append(cell)
                print(json.dumps(cell), flush=True)
            if model in SLEEPERS and time.monotonic() < until:
                of_model["sleep"] = sleep(model)
                print(json.dumps(of_model["sleep"]), flush=True)
        except Exception as error:  # what was measured until then is kept
            of_model["failed"] = repr(error)[:1000]
            print(f"{model}: {error!r}", flush=True)
        of_model["seconds"] = round(time.monotonic() - began, 1)
        _free()
        if options.write:
            records.write(RESULTS, result)
    print(table(result, contexts))


def measured(shape: str, contexts: list[int], until: float) -> Iterator[dict[str, Any]]:
    """Every cell, learner by learner, so that no two models are in memory at once."""
    length = max(contexts) + 1
    for cells in KINDS:
        for cell in cells(shape, length):
            largest = None
            for context in contexts:
                if time.monotonic() > until:
                    return
                if largest is not None:
                    continue
                found = _peak(lambda cell=cell, context=context: once(cell, context))  # type: ignore[misc]
                if "does_not_fit" in found:
                    largest = context
                yield {"stage": cell.stage, "way": cell.way, "context": context, **found}
        del cell
        _free()


def _peak(work: Callable[[], object]) -> dict[str, Any]:
    _free()
    if not CUDA:
        work()
        return {"rss_gib": round(_own_memory(), 2)}
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        work()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return {"does_not_fit": str(error)[:200]}
    except StageError as error:
        return {"does_not_fit": str(error)[:400]}
    return {
        "at_rest_gib": round(at_rest / GIB, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "seconds": round(time.perf_counter() - began, 2),
    }


def sleep(shape: str) -> dict[str, Any]:
    """What the GPU has in use with a generator awake, asleep, and awake again."""
    generator = TorchGenerator(DEVICE, PRECISION, 512)
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, Path(folder) / "model")
        _free()
        before = _in_use()
        generator.load(Path(folder) / "model")
    requests = [Request(tokens(shape, 25, 1), seed=index) for index in range(512)]

    def answer() -> None:
        generator.generate(requests, max_new_tokens=256 if CUDA else 4, sampling=Sampling())

    answer()
    awake = _in_use()
    seconds_to_sleep = _timed(generator.sleep)
    asleep = _in_use()
    seconds_to_wake = _timed(generator.wake)
    answer()
    again = _in_use()
    generator.close()
    _free()
    names = ("before", "awake", "asleep", "awake_again", "closed")
    used = dict(zip(names, (before, awake, asleep, again, _in_use()), strict=True))
    return {
        "slots": 512,
        "seconds_to_sleep": seconds_to_sleep,
        "seconds_to_wake": seconds_to_wake,
        **{f"{name}_gib": value for name, value in used.items()},
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return round(time.perf_counter() - began, 3)


def _in_use() -> dict[str, float]:
    """By torch's count, and by the driver's, which sees graphs and libraries too."""
    if not CUDA:
        return {"rss": round(_own_memory(), 2)}
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    return {"allocated": round(allocated / GIB, 2), "driver": round((total - free) / GIB, 2)}


def _own_memory() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss / GIB)


def _free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def table(result: dict[str, Any], contexts: list[int]) -> str:
    """As Markdown: peak GiB by stage and context, for each model."""
    name = "peak_gib" if CUDA else "rss_gib"
    head = ["model", "stage", *(f"{context / 1024:g}k" for context in contexts)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for model, found in result["models"].items():
        rows: dict[str, dict[int, str]] = {}
        for cell in found["cells"]:
            row = rows.setdefault(", ".join(filter(None, (cell["stage"], cell["way"]))), {})
            row[cell["context"]] = str(cell.get(name, "does not fit"))
        for stage, row in rows.items():
            cells = [row.get(context, "–") for context in contexts]
            lines.append("| " + " | ".join([model, stage, *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
