"""What it costs that a stage is a Slurm job: beside a bare `sbatch --wait` of a script.

On a development cluster of its own, in turn and several times over, it times
  bare      `sbatch --wait` of a script that notes the time;
  lockstep  `dvc repro` of `prepare` on Slurm, with its code replaced by one that writes empty
            outputs and notes the time in its first and last line.
Both are split into from submission to start, and from end to return. Slurm starts jobs at once
here; on a real cluster the queue comes on top of both. `sbatch --wait` asks Slurm every few
seconds, while a stage's driver sees its result file. Medians are compared within the run.

    python benchmarks/slurm_latency.py [--rounds 7] [--write]

`--write` records the result in benchmarks/results/slurm_latency.json. Needs Slurm's packages.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clones import ROOT, environment, make_clone, write_code
from records import machine, report, versions
from startup import EMPTY_STAGE

sys.path.insert(0, str(ROOT / "tools"))

from slurm_cluster import Cluster
from slurm_conf import Layout

PORT = 33100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        cluster = Cluster(Layout(Path(name) / "c", port=PORT))
        cluster.up()
        try:
            clone = make_clone(Path(name) / "clone")
            write_code(clone, "stages/prepare.py", EMPTY_STAGE)
            variables = {
                **environment(),
                **cluster.environment,
                "LOCKSTEP_PROFILE": "slurm-dev",
                "LOCKSTEP_TRACKING": "off",
            }
            rounds = [
                (time_bare(Path(name), variables), time_lockstep(clone, variables))
                for _ in range(arguments.rounds + 1)
            ][1:]
            version = cluster.run("sinfo", "--version").split()[1]
        finally:
            cluster.down()
    result = {
        **summary("bare_sbatch_wait", [bare for bare, _ in rounds]),
        **summary("lockstep_stage", [stage for _, stage in rounds]),
        "rounds": arguments.rounds,
        "machine": machine(),
        "versions": {"slurm": version, **versions("dvc", "submitit")},
    }
    report("slurm_latency", result, to_file=arguments.write)


def summary(name: str, times: list[tuple[float, float]]) -> dict[str, float]:
    return {
        f"{name}_submit_to_start_s": round(statistics.median(a for a, _ in times), 2),
        f"{name}_end_to_return_s": round(statistics.median(b for _, b in times), 2),
    }


def time_bare(folder: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Seconds from sbatch to the script, and from the script's end to sbatch's."""
    note = folder / "bare.txt"
    submitted = time.time()
    subprocess.run(
        ["sbatch", "--wait", "--quiet", "-o", "/dev/null", "--wrap", f"date +%s.%N > {note}"],
        env=variables,
        check=True,
    )
    ended = time.time()
    ran = float(note.read_text(encoding="utf-8"))
    return ran - submitted, ended - ran


def time_lockstep(clone: Path, variables: dict[str, str]) -> tuple[float, float]:
    """Seconds from the driver's submission to the stage, and from its end to dvc's."""
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "--force", "prepare"],
        cwd=clone,
        env=variables,
        check=True,
        capture_output=True,
    )
    ended = time.time()
    newest = max((clone / ".lockstep/jobs/prepare").glob("*/lines.txt"), key=os.path.getmtime)
    first, last = map(float, newest.read_text(encoding="utf-8").split())
    launch = json.loads((newest.parent / "attempts/001/launch.json").read_text(encoding="utf-8"))
    return first - launch["time"], ended - last


if __name__ == "__main__":
    main()
