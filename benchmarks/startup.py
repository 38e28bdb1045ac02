"""What it costs that each stage is a process: an empty stage beside bare DVC stages.

In one throwaway clone, in turn and several times over, it times
  bare      `dvc repro` of a stage whose command is `true`;
  writing   of one whose shell command writes as many empty outputs as `prepare` has, which DVC
            then hashes, links into its cache and records;
  warm      `dvc repro` of `prepare` with its code replaced by one that writes empty outputs;
  fresh     the same with LOCKSTEP_WARM=off.
The stage notes the time in its first and in its last line, so that the cost splits into what comes
before and what comes after. Medians are compared within the run, as machines are noisy.

    python benchmarks/startup.py [--rounds 7] [--write]

`--write` records the result in benchmarks/results/startup.json, by the kind of machine.
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

from clones import environment, make_clone, write_code
from records import RESULTS, add, machine, versions

AIM_S = 0.8
OUTS = 10
"""Of `prepare`, beside its metrics."""

EMPTY_STAGE = """
import time
from pathlib import Path

def run(config, inputs, out, ctx):
    first = time.time()
    for path in out.values():
        path.write_text("")
    (Path(ctx.folder) / "lines.txt").write_text(f"{first} {time.time()}")
    return {"done": 1}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = empty_clone(Path(folder))
        rounds = [
            (
                time_bare(clone, "bare"),
                time_bare(clone, "writing"),
                time_lockstep(clone),
                time_lockstep(clone, LOCKSTEP_WARM="off"),
            )
            for _ in range(arguments.rounds + 1)
        ][1:]
        subprocess.run(["lockstep", "down"], cwd=clone, env=environment(), check=True)
    bare = statistics.median(whole for whole, _, _, _ in rounds)
    writing = statistics.median(whole for _, whole, _, _ in rounds)
    warm = [parts for _, _, parts, _ in rounds]
    whole = statistics.median(map(sum, warm))
    fresh = statistics.median(sum(parts) for _, _, _, parts in rounds)
    result = {
        "bare_dvc_stage_s": round(bare, 2),
        "bare_dvc_stage_that_writes_s": round(writing, 2),
        "repro_to_first_line_s": round(statistics.median(before for before, _ in warm), 2),
        "last_line_to_exit_s": round(statistics.median(after for _, after in warm), 2),
        "empty_lockstep_stage_s": round(whole, 2),
        "over_bare_s": round(whole - bare, 2),
        "over_bare_that_writes_s": round(whole - writing, 2),
        "ratio": round(whole / bare, 2),
        "in_a_fresh_process_s": round(fresh, 2),
        "aim_over_bare_s": AIM_S,
        "rounds": arguments.rounds,
        "versions": versions("dvc", "submitit", "pydantic", "mlflow"),
    }
    print(json.dumps(result, indent=2))
    if arguments.write:
        add(RESULTS / "startup.json", machine(), result)


def empty_clone(folder: Path) -> Path:
    """A clone with an empty `prepare`, and two bare stages beside it in dvc.yaml."""
    clone = make_clone(folder)
    write_code(clone, "stages/prepare.py", EMPTY_STAGE)
    graph = clone / "dvc.yaml"
    outs = [f"writing/{number}" for number in range(OUTS)]
    bare = "stages:\n  bare:\n    cmd: 'true'\n    deps: [params.yaml]\n"
    bare += (
        f"  writing:\n    cmd: mkdir -p writing && touch {' '.join(outs)} && echo {{}} >w.json\n"
    )
    bare += f"    deps: [params.yaml]\n    outs: [{', '.join(outs)}]\n"
    bare += "    metrics: [w.json: {cache: false}]\n"
    text = graph.read_text(encoding="utf-8").replace("stages:\n", bare, 1)
    graph.write_text(text, encoding="utf-8")
    return clone


def repro(clone: Path, stage: str, **variables: str) -> tuple[float, float]:
    """Start and end of one forced `dvc repro`."""
    start = time.time()
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "--force", stage],
        cwd=clone,
        env={**environment(), **variables},
        check=True,
        capture_output=True,
    )
    return start, time.time()


def time_bare(clone: Path, stage: str) -> float:
    start, end = repro(clone, stage)
    return end - start


def time_lockstep(clone: Path, **variables: str) -> tuple[float, float]:
    """Seconds before the stage's first line and after its last."""
    start, end = repro(clone, "prepare", **variables)
    newest = max((clone / ".lockstep/jobs/prepare").glob("*/lines.txt"), key=os.path.getmtime)
    first, last = map(float, newest.read_text(encoding="utf-8").split())
    return first - start, end - last


if __name__ == "__main__":
    main()
