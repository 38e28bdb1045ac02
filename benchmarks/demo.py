"""What `make demo` learns and how long it takes, for both algorithms and several seeds.

For each seed, in a throwaway clone with the shipped params: PPO with the reward model, then GRPO
(`lockstep preset grpo`) with the verifier from the same SFT policy. Reports the numbers that the
pipeline itself measured on held-out prompts, the wall time of the first run, and the seconds of
each stage.

    python benchmarks/demo.py [--seeds 17 18 19] [--write]

`--write` records the result in benchmarks/results/demo.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

from clones import environment, make_clone, set_params
from records import machine, report, versions

MEASURED = ("accuracy", "accuracy_sampled", "reward_mean", "kl_to_reference", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[17])
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    runs = [measure(seed) for seed in arguments.seeds]
    result = {
        "runs": runs,
        "machine": machine(),
        "versions": versions("torch", "transformers", "dvc"),
    }
    report("demo", result, to_file=arguments.write)


def measure(seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        clone = make_clone(Path(folder))
        set_params(clone, {"seed": seed})
        started = time.time()
        lockstep(clone, "run")
        wall = time.time() - started
        measured = {"seed": seed, "pipeline_seconds": round(wall, 1), "stages": stages(clone)}
        measured["ppo_reward_model"] = outcome(clone)
        lockstep(clone, "preset", "grpo")
        set_params(clone, {"rl.reward": "verifier"})
        lockstep(clone, "run")
        measured["grpo_verifier"] = outcome(clone)
        return measured


def lockstep(clone: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pipelines", *words]
    subprocess.run(command, cwd=clone, env=environment(), check=True, stdout=sys.stderr)


def outcome(clone: Path) -> dict[str, Any]:
    """What the pipeline says of itself, policy by policy."""
    summary = json.loads((clone / "metrics/report.json").read_text(encoding="utf-8"))
    policies = {}
    for path in sorted((clone / "metrics/evaluations").glob("*.json")):
        metrics = json.loads(path.read_text(encoding="utf-8"))
        policies[path.stem] = {name: round(metrics[name], 4) for name in MEASURED}
    return {
        "accuracy_gain": round(summary["accuracy_gain"], 4),
        "reward_pairwise_accuracy": round(summary["reward_pairwise_accuracy"], 4),
        "policies": policies,
    }


def stages(clone: Path) -> dict[str, float]:
    """Seconds of each job, from the ledger."""
    found = (clone / ".lockstep/jobs").glob("*/*/record.json")
    records = sorted(
        (json.loads(path.read_text(encoding="utf-8")) for path in found), key=itemgetter("started")
    )
    return {record["stage"]: round(record["ended"] - record["started"], 1) for record in records}


if __name__ == "__main__":
    main()
