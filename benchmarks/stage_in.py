"""What `stage_in` saves where the shared folder is slow: the start of a job, and its checkpoints.

On a development cluster of its own, whose jobs read and write the clone at no more than SPEED MB/s
(slow_folder.c, preloaded into each process of a job), one job after another on one node reads an
input of INPUT MB, and then makes steps that are pauses of half a second, with a checkpoint of
CHECKPOINT MB every five seconds, in the loop that all training has:
  shared    without `stage_in`;
  first     with it, on a node that has nothing yet;
  second    with it, on the node where the job before has left the input.
Of each it records the seconds after its imports until it has checked and read its input; how long
all steps took; the longest time that one had to wait for a checkpoint; and the age of the newest
state in the shared folder, at worst, which is what the loss of the node would cost. What is read
through a mapping into memory is not slowed, so the numbers are on the safe side.

    python benchmarks/stage_in.py [--speed 40] [--input 200] [--checkpoint 60] [--write]

`--write` records the result in benchmarks/results/stage_in.json. Needs Slurm's packages and gcc.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from clones import ROOT, environment, make_clone, set_params, write_code
from records import machine, report, versions
from ruamel.yaml import YAML

sys.path.insert(0, str(ROOT / "tools"))

from slurm_cluster import Cluster
from slurm_conf import Layout

PORT = 33400
NODE = "127.0.0.11"
STEPS, STEP_S, CHECKPOINT_S = 60, 0.5, 5.0
STAGE = """
import json
import time

import torch

from stages.algorithms.loss import Counts, Loss
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, Work, train
from stages.engines.training.optimizer import Learner

IMPORTED = time.monotonic()


def run(config, inputs, out, ctx):
    for path in inputs["base"].iterdir():
        path.read_bytes()
    ready = time.monotonic() - IMPORTED
    # Weights and two moments, four bytes each.
    model = torch.nn.Linear(1000, CHECKPOINT_MB * 1_000_000 // 12_000, bias=False)
    begun, ages, saved = [], [], [0]

    def loss(rows, step):
        begun.append(time.monotonic())
        # Up to now, the loss of the node would have cost the time since that state.
        ages.append(begun[-1] - begun[saved[-1]])
        saved.append(max([int(path.name[-8:]) for path in ctx.scratch.glob("checkpoint-*")] + [0]))
        time.sleep(STEP_S)
        return Loss(model.weight[:1].square().sum())

    learner = Learner(model, Optimization(learning_rate=1e-3, max_grad_norm=1.0))
    plan = Plan(STEPS, 1, 1, seed=1, learning_rate=lambda step, steps: 1.0)
    train(ctx, {"model": learner}, plan, Work(lambda rows: Counts(1, 1), loss), shown=["loss"])
    took = time.monotonic() - begun[0]
    longest = max(later - earlier for earlier, later in zip(begun, begun[1:]))
    (ctx.folder / "measured.json").write_text(
        json.dumps(
            {
                "input_s": round(ready, 1),
                "steps_s": round(took, 1),
                "longest_step_s": round(longest, 2),
                "oldest_shared_state_s": round(max(ages), 1),
            }
        )
    )
    for path in out.values():
        path.mkdir()
        (path / "done").write_text("done")
    return {"loss": 1.0}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speed", type=int, default=40, help="of the shared folder, in MB/s")
    parser.add_argument("--input", type=int, default=200, help="size of the input, in MB")
    parser.add_argument("--checkpoint", type=int, default=60, help="of a checkpoint, in MB")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        folder = Path(name)
        slow = build(folder / "slow.so")
        cluster = Cluster(Layout(folder / "c", port=PORT))
        cluster.up()
        try:
            clone = make_clone(folder / "clone")
            prepare(clone, arguments.input, arguments.checkpoint)
            setup = [
                f"export SLOW_FOLDER={clone} SLOW_MB_S={arguments.speed} LD_PRELOAD={slow}",
            ]
            stage_in = {"folder": str(folder / "local"), "size": "10G"}
            measured = {
                run: measure(clone, cluster.environment, seed, setup, settings)
                for seed, (run, settings) in enumerate(
                    {"shared": None, "first": stage_in, "second": stage_in}.items(), 1
                )
            }
            version = cluster.run("sinfo", "--version").split()[1]
        finally:
            cluster.down()
    result = {
        **measured,
        "shared_mb_per_s": arguments.speed,
        "input_mb": arguments.input,
        "checkpoint_mb": arguments.checkpoint,
        "checkpoint_seconds": CHECKPOINT_S,
        "steps": f"{STEPS} of {STEP_S} s",
        "load_of_the_machine": round(os.getloadavg()[1], 1),
        "machine": machine(),
        "versions": {"slurm": version, **versions("torch")},
    }
    report("stage_in", result, to_file=arguments.write)


def build(path: Path) -> Path:
    source = Path(__file__).with_name("slow_folder.c")
    words = ["gcc", "-O2", "-shared", "-fPIC", "-o", path, source, "-ldl", "-lpthread"]
    subprocess.run(words, check=True)
    return path


def prepare(clone: Path, input_mb: int, checkpoint_mb: int) -> None:
    """Inputs of SFT that no stage has made, and a stage that only reads them."""
    numbers = {
        "CHECKPOINT_MB": checkpoint_mb,
        "STEPS": STEPS,
        "STEP_S": STEP_S,
    }
    heads = "".join(f"{name} = {value}\n" for name, value in numbers.items())
    write_code(clone, "stages/sft.py", STAGE.replace("IMPORTED =", f"{heads}IMPORTED ="))
    (clone / "artifacts/base").mkdir(parents=True)
    (clone / "artifacts/data").mkdir()
    (clone / "artifacts/data/demonstrations.parquet").write_bytes(b"few")
    for part in range(4):
        (clone / f"artifacts/base/part-{part}").write_bytes(os.urandom(input_mb * 250_000))


def measure(
    clone: Path,
    variables: dict[str, str],
    seed: int,
    setup: list[str],
    stage_in: dict[str, str] | None,
) -> dict[str, Any]:
    """One job; with another seed it is another one."""
    set_params(clone, {"seed": seed})
    yaml, path = YAML(), clone / "slurm_profiles/slurm-dev.yaml"
    profile = yaml.load(path)
    profile["defaults"] |= {
        "setup": setup,
        "checkpoint_seconds": CHECKPOINT_S,
        "extra": {"nodelist": NODE},
        "stage_in": stage_in,
    }
    yaml.dump(profile, path)
    own = {"LOCKSTEP_PROFILE": "slurm-dev", "LOCKSTEP_TRACKING": "off"}
    subprocess.run(
        [sys.executable, "-m", "pipelines", "stage", "sft"],
        cwd=clone,
        env={**environment(), **variables, **own},
        check=True,
    )
    newest = max(clone.glob(".lockstep/jobs/sft/*/measured.json"), key=os.path.getmtime)
    measured: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8"))
    return measured


if __name__ == "__main__":
    main()
