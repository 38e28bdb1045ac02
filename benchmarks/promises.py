"""What the promises cost: checkpoints, hashes, and how soon a killed stage works again.

  checkpoints  what one takes to write and to read, by size of the model, and its share of a stage's
               time at the shipped interval (`checkpoint_seconds` of the profile `local`);
  hashes       seconds for a GB, as the worker and `lockstep verify` read it: in one file, and in as
               many as there are cores, beside reading alone;
  restart      an SFT stage of the shipped pipeline is killed with -9 in the middle of its steps and
               the same command is run at once: seconds from the kill to the first new step, split
               where the job starts and where its libraries and weights are loaded. Beside it the
               same for a first start, so that what a kill adds can be seen; and how many steps were
               computed twice.

    python benchmarks/promises.py [--rounds 5] [--write]

`--write` records the result in benchmarks/results/promises.json.
"""

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clones import ROOT, environment, make_clone
from records import machine, report, versions

sys.path.insert(0, str(ROOT))

GB = 10**9
MODELS = {"1M": (128, 4, 256), "30M": (512, 8, 2048), "135M": (576, 30, 1536)}
"""Width, layers, width of the feed-forward part."""
VOCABULARY = {"1M": 64, "30M": 8192, "135M": 49152}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "checkpoints": time_checkpoints(folder, arguments.rounds),
            "hashes": time_hashes(folder, arguments.rounds),
            "restart": time_restarts(folder, arguments.rounds),
            "rounds": arguments.rounds,
            "machine": machine(),
            "versions": versions("torch", "safetensors", "dvc"),
        }
    report("promises", result, to_file=arguments.write)


def time_checkpoints(folder: Path, rounds: int) -> dict[str, Any]:
    """A model with AdamW's moments, written and read as the training loop does it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.checkpoint import load_checkpoint, save_checkpoint
    from stages.engines.training.learner import Optimization
    from stages.engines.training.optimizer import Learner
    from stages.engines.training.resume import tensors_of

    interval = checkpoint_seconds()
    found: dict[str, Any] = {"checkpoint_seconds": interval}
    for size, (width, layers, inner) in MODELS.items():
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=1,
            vocab_size=VOCABULARY[size],
            tie_word_embeddings=True,
        )
        how = Optimization(learning_rate=1e-3, max_grad_norm=1.0)
        learner = Learner(LlamaForCausalLM(config), how)
        for parameter in learner.parameters():
            parameter.grad = torch.ones_like(parameter)
        learner.step(1.0)
        scratch = folder / f"scratch-{size}"
        scratch.mkdir()
        (forms, fetch), values = tensors_of({"model": learner}), {"history": [{"loss": 1.0}] * 1000}
        steps = iter(range(rounds + 1))
        write = median_seconds(
            lambda: save_checkpoint(scratch, next(steps), forms, fetch, values),  # noqa: B023
            rounds,
        )
        read = median_seconds(lambda: load_checkpoint(scratch), rounds)  # noqa: B023
        num_bytes = sum(form.nbytes for form in forms.values())
        found[size] = {
            "parameters": sum(parameter.numel() for parameter in learner.parameters()),
            "gigabytes": round(num_bytes / GB, 3),
            "write_s": round(write, 3),
            "write_gb_per_s": round(num_bytes / GB / write, 2),
            "read_s": round(read, 3),
            "share_of_stage_time": round(write / (interval + write), 4),
        }
    return found


def checkpoint_seconds() -> float:
    from pipelines.config.profiles import load_profile

    return load_profile(ROOT, "local").resources("sft").checkpoint_seconds


def time_hashes(folder: Path, rounds: int) -> dict[str, Any]:
    """One GB in one file and in several, hashed as DVC does; and only read."""
    from pipelines.identity.hashing import HashCache

    cores = os.cpu_count() or 1
    one, many = folder / "one", folder / "many"
    for place, files in ((one, 1), (many, cores)):
        place.mkdir()
        for number in range(files):
            block = hashlib.sha256(str(number).encode()).digest() * (1 << 15)
            with (place / f"part-{number}").open("wb") as file:
                for _ in range(GB // files // len(block)):
                    file.write(block)
    read = median_seconds(lambda: read_all(one), rounds)
    single = median_seconds(lambda: HashCache().of(one), rounds)
    several = median_seconds(lambda: HashCache().of(many), rounds)
    return {
        "read_s_per_gb": round(read, 3),
        "hash_s_per_gb": round(single, 3),
        f"hash_s_per_gb_in_{cores}_files": round(several, 3),
    }


def read_all(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """The first time is for warming up."""
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def time_restarts(folder: Path, rounds: int) -> dict[str, Any]:
    clone = make_clone(folder / "clone")
    params = clone / "params.yaml"
    params.write_text(
        params.read_text(encoding="utf-8").replace("  epochs: 4\n", "  epochs: 4000\n", 1),
        encoding="utf-8",
    )
    profile = clone / "slurm_profiles/local.yaml"
    profile.write_text(
        profile.read_text(encoding="utf-8") + "  checkpoint_seconds: 1\n", encoding="utf-8"
    )
    run(clone, "prepare").wait()
    first = []
    killed = []
    for _ in range(rounds):
        started = time.time()
        command = run(clone, "sft")
        first.append(parts(clone, started, after_step=0))
        time.sleep(3)
        last = steps(clone)[-1]["step"]
        kill_worker(clone)
        at = time.time()
        command.wait()
        command = run(clone, "sft")
        again = parts(clone, at, after_step=0, since=at)
        again["steps_computed_twice"] = last + 1 - again.pop("first_step")
        killed.append(again)
        kill_worker(clone)
        command.wait()
        for entry in (clone / ".lockstep/jobs/sft").glob("*"):
            subprocess.run(["rm", "-r", str(entry)], check=True)
    for found in first:
        del found["first_step"]
    return {"first_start": medians(first), "after_kill_9": medians(killed)}


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in found), 2) for name in found[0]}


def run(clone: Path, stage: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["lockstep", "run", stage],
        cwd=clone,
        env={**environment(), "PYTHONPATH": str(clone), "LOCKSTEP_TRACKING": "off"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def steps(clone: Path) -> list[dict[str, Any]]:
    path = next((clone / ".lockstep/jobs/sft").glob("*/metrics.jsonl"), None)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def parts(clone: Path, started: float, *, after_step: int, since: float = 0.0) -> dict[str, float]:
    """Seconds from `started` to the job's start and from there to the first step logged."""
    while True:
        new = [row for row in steps(clone) if row["time"] > max(since, started)]
        if new:
            break
        time.sleep(0.02)
    attempts = sorted((clone / ".lockstep/jobs/sft").glob("*/attempts/*/worker.json"))
    worker = json.loads(attempts[-1].read_text(encoding="utf-8"))["time"]
    assert new[0]["step"] > after_step
    return {
        "to_the_job_s": worker - started,
        "libraries_weights_first_step_s": new[0]["time"] - worker,
        "whole_s": new[0]["time"] - started,
        "first_step": new[0]["step"],
    }


def kill_worker(clone: Path) -> None:
    attempts = sorted((clone / ".lockstep/jobs/sft").glob("*/attempts/*/worker.json"))
    os.kill(json.loads(attempts[-1].read_text(encoding="utf-8"))["pid"], signal.SIGKILL)


if __name__ == "__main__":
    main()
