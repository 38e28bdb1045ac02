"""The shipped demo with processes that are ready, beside the same with a fresh process each.

Both run `lockstep run` in throwaway clones, one after the other in the same session, and end with
the same dvc.lock. Each stage's time is split by what the ledger notes:
  dvc       from the start of its dvc to the order: DVC reads its files, the driver hashes
  worker    from the order to the job's process
  stage     what it imports, and the stage's own work
  publish   from its last line to its outputs in the workspace
  record    from there to the end of dvc: DVC hashes, caches and writes dvc.lock
and what the command takes beyond its stages: planning before, and MLflow's last runs after them.

    python benchmarks/warm.py [--tiny] [--before REVISION] [--write]

`--tiny` takes a pipeline that learns nothing, to look at the parts in a minute. `--before` runs an
earlier revision as well, with the same libraries; its bytes may be others.
"""

import argparse
import hashlib
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from clones import environment, make_clone, set_params
from records import machine, report, versions

AIM = 0.4
TINY = {
    **{"model.hidden_size": 32, "model.num_layers": 1, "sft.epochs": 1},
    **{"prepare.demonstrations": 48, "prepare.preferences": 48},
    **{"prepare.prompts": 32, "prepare.held_out": 16},
    **{"rollout.prompts": 8, "rollout.samples": 2},
    **{"policy_update.epochs": 1, "policy_update.batch_size": 8},
    **{"evaluate.samples": 1, "evaluate.pass_at": [1]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a pipeline that learns nothing")
    parser.add_argument("--before", metavar="REVISION", help="an earlier one, to compare with")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    runs: dict[str, Any] = {}
    if arguments.before:
        with tempfile.TemporaryDirectory() as folder:
            clone = make_clone(Path(folder), arguments.before)
            runs["before"] = run_demo(clone, {"PYTHONPATH": str(clone)}, tiny=arguments.tiny)
            runs["before"]["revision"] = arguments.before
    for name, variables in (("fresh", {"LOCKSTEP_WARM": "off"}), ("warm", {})):
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = run_demo(make_clone(Path(folder)), variables, tiny=arguments.tiny)
    assert runs["fresh"]["dvc_lock"] == runs["warm"]["dvc_lock"], "the bytes differ"
    result = {
        **{
            f"ratio_to_{name}": round(runs["warm"]["seconds"] / runs[name]["seconds"], 3)
            for name in ("before", "fresh")
            if name in runs
        },
        "aim": AIM,
        **runs,
        "machine": machine(),
        "versions": versions("torch", "transformers", "dvc", "mlflow"),
    }
    report("warm", result, to_file=arguments.write)


def run_demo(clone: Path, variables: dict[str, str], *, tiny: bool) -> dict[str, Any]:
    """One `lockstep run` of everything: its seconds, and where they went."""
    surroundings = {**environment(), **variables}
    if tiny:
        set_params(clone, TINY)
    start = time.monotonic()
    subprocess.run(
        ["python", "-m", "pipelines", "run"],
        cwd=clone,
        env=surroundings,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    taken = time.monotonic() - start
    subprocess.run(["python", "-m", "pipelines", "down"], cwd=clone, env=surroundings, check=True)
    entries = [path.parent for path in clone.glob(".lockstep/jobs/*/*/record.json")]
    parts: dict[str, float] = defaultdict(float)
    for entry in entries:
        for name, seconds in split(clone, entry).items():
            parts[name] += seconds
    return {
        "seconds": round(taken, 1),
        "stages": len(entries),
        "summed_over_stages_s": {name: round(seconds, 1) for name, seconds in parts.items()},
        "dvc_lock": hashlib.sha256((clone / "dvc.lock").read_bytes()).hexdigest(),
    }


def split(clone: Path, entry: Path) -> dict[str, float]:
    """Where one stage's time went."""
    record = json.loads((entry / "record.json").read_text(encoding="utf-8"))
    created = json.loads((entry / "entry.json").read_text(encoding="utf-8"))["created"]
    began = record["started"]
    output = next(clone.glob(f".lockstep/runs/*/{record['stage']}.log"))
    born = subprocess.run(
        ["stat", "--format", "%.W", output], capture_output=True, check=True, text=True
    )
    return {
        "dvc": created - float(born.stdout),
        "worker": began - created,
        "stage": record["ended"] - began,
        "publish": record["published"] - record["ended"],
        "record": output.stat().st_mtime - record["published"],
    }


if __name__ == "__main__":
    main()
