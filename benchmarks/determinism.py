"""Whether two runs on a GPU make the same bytes, and what it costs to be sure of it.

The stages of the shipped pipeline, a DPO run and a GRPO update run one after another, with less
data and a model of 106 million weights, in a process of their own for each run: with
`deterministic` and without, in turn. Outputs are compared by hash, times as a ratio within the run.

    python benchmarks/determinism.py [--device cuda] [--rounds 2] [--write]

`--write` records the result in benchmarks/results/determinism.json.
"""

import argparse
import hashlib
import importlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import hardware, report, versions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PREPARATION = ("prepare",)
MEASURED = (
    "sft",
    "reward_model",
    "reference_logprobs@dpo",
    "preference@dpo",
    "rollout@iter_001",
    "score@iter_001",
    "policy_update@iter_001",
)
ALGORITHMS = ("ppo", "grpo")
CHANGES: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
    },
    "prepare": {"demonstrations": 1024, "preferences": 640, "prompts": 512},
    "sft": {"epochs": 1, "learning_rate": 3.0e-4},
    "reward_model": {"learning_rate": 2.0e-4},
    "rollout": {"prompts": 64},
    "policy_update": {"max_kl": 100.0, "learning_rate": 1.0e-5, "epochs": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--small", action="store_true", help="the shipped model, to try it out")
    parser.add_argument("--write", action="store_true", help="record the result")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "DETERMINISTIC"))
    arguments = parser.parse_args()
    if arguments.child:
        folder, deterministic = arguments.child
        print(json.dumps(run_stages(Path(folder), arguments, deterministic == "True")))
        return
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for _ in range(arguments.rounds):
        for deterministic in (True, False):
            runs[deterministic].append(in_a_process(arguments, deterministic))
            print(deterministic, runs[deterministic][-1], file=sys.stderr, flush=True)
    result = compare(runs) | {
        "device": hardware(arguments.device),
        "machine": platform.machine(),
        "rounds": arguments.rounds,
        "model": {} if arguments.small else CHANGES["model"],
        "versions": versions("torch", "transformers"),
    }
    report("determinism", result, to_file=arguments.write)


def in_a_process(arguments: argparse.Namespace, deterministic: bool) -> dict[str, Any]:
    """cuBLAS reads its settings once, so each run is a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--child", folder, str(deterministic)]
        words += ["--device", arguments.device, *(["--small"] if arguments.small else [])]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, check=True, encoding="utf-8", errors="replace"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_stages(
    folder: Path, arguments: argparse.Namespace, deterministic: bool
) -> dict[str, dict[str, Any]]:
    """Seconds of each stage, and a hash over its outputs."""

    from stages.context import Context
    from stages.contracts.catalog import bind
    from stages.contracts.params import Params
    from stages.engines.processes import determinism

    if deterministic:
        determinism.before_import()
    importlib.import_module("torch")
    if deterministic:
        determinism.after_import()
    found: dict[str, dict[str, Any]] = {}
    changes = {} if arguments.small else CHANGES
    for algorithm in ALGORITHMS:
        tree = {"algorithm": algorithm, "preferences": {"dpo": {"policy": "sft"}}}
        values = {**changes, "rl": tree}
        if algorithm == "grpo":
            update = {**changes.get("policy_update", {}), "kl_in": "loss", "kl_estimator": "k3"}
            values["policy_update"] = update
        params = Params.model_validate(values)
        for name in ("data", "models"):
            (folder / name).mkdir(exist_ok=True)
        for address in (*PREPARATION, *MEASURED):
            label = f"{algorithm} {address}" if "update" in address else address
            if label in found:
                continue
            bound = bind(address, params)
            inputs = {name: folder / path for name, path in bound.inputs.items()}
            outs = {name: folder / path for name, path in bound.outs.items()}
            for path in outs.values():
                path.parent.mkdir(parents=True, exist_ok=True)
            job = folder / "jobs" / label
            job.mkdir(parents=True)
            if algorithm != ALGORITHMS[0]:
                outs = {name: job / name for name in outs}
            ctx = Context(
                stage=address, key=bound.key, seed=params.seed, folder=job, device=arguments.device
            )
            started = time.perf_counter()
            stage = importlib.import_module(bound.stage.module)
            loaded = time.perf_counter()
            stage.run(bound.config, inputs, outs, ctx)
            synchronise(arguments.device)
            found[label] = {
                "import_s": loaded - started,
                "seconds": time.perf_counter() - loaded,
                "hash": hash_of(outs),
            }
    return {label: found[label] for label in found if label not in PREPARATION}


def synchronise(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def hash_of(outs: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, top in sorted(outs.items()):
        for path in [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file()):
            digest.update(f"{name} {path.relative_to(top)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def compare(runs: dict[bool, list[dict[str, Any]]]) -> dict[str, Any]:
    stages = {}
    for label in runs[True][0]:
        seconds = {
            kind: statistics.median(run[label]["seconds"] for run in runs[kind]) for kind in runs
        }
        hashes = {kind: [run[label]["hash"][:16] for run in runs[kind]] for kind in runs}
        stages[label] = {
            "deterministic_s": round(seconds[True], 2),
            "otherwise_s": round(seconds[False], 2),
            "ratio": round(seconds[True] / seconds[False], 3),
            "same_bytes_deterministic": len(set(hashes[True])) == 1,
            "same_bytes_otherwise": len(set(hashes[False])) == 1,
        }
    totals = {
        kind: statistics.median(sum(s["seconds"] for s in run.values()) for run in runs[kind])
        for kind in runs
    }
    return {"stages": stages, "ratio_of_totals": round(totals[True] / totals[False], 3)}


if __name__ == "__main__":
    main()
