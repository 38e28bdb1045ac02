"""What a session saves: the loop's stages in processes of their own, and in one that stays.

In a throwaway clone with the shipped params, SFT and reward model are made once. From two copies of
it, `lockstep run policy_update@ITERATION` then computes rollout, score and policy update of all
iterations:
  plain    each stage a process of its own;
  session  with `lockstep session up`, which is waited for and timed apart.
Both must end with the same dvc.lock. Times are seconds on the wall; how busy the machine was
otherwise is recorded beside them.

    python benchmarks/session.py [--write] [--start CLONE]

`--write` records the result in benchmarks/results/session.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from clones import environment, make_clone
from records import machine, report, versions

LOOP = ("rollout", "score", "policy_update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the result")
    parser.add_argument("--start", type=Path, help="a clone that has them already, to copy")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = arguments.start or make_clone(Path(folder) / "start")
        lockstep(start, "run", "sft", "reward_model")
        plain = shutil.copytree(start, Path(folder) / "plain", symlinks=True)
        session = shutil.copytree(start, Path(folder) / "session", symlinks=True)
        load = [round(os.getloadavg()[0], 1)]
        in_processes = run_loop(plain)
        load.append(round(os.getloadavg()[0], 1))
        up_s = session_up(session)
        in_session = run_loop(session)
        load.append(round(os.getloadavg()[0], 1))
        said = json.loads(lockstep(session, "session", "status", "--json"))[0]
        lockstep(session, "session", "down")
        locks = [(clone / "dvc.lock").read_bytes() for clone in (plain, session)]
    result = {
        "iterations": len(in_processes["stages"]["rollout"]),
        "plain": in_processes,
        "session": in_session,
        "session_up_s": up_s,
        "loads_saved": said["reused"],
        "times_faster": round(in_processes["whole_s"] / in_session["whole_s"], 2),
        "same_dvc_lock": locks[0] == locks[1],
        "load_before_between_after": load,
        "machine": machine(),
        "versions": versions("torch", "transformers", "dvc"),
    }
    report("session", result, to_file=arguments.write)


def lockstep(clone: Path, *words: str) -> str:
    done = subprocess.run(
        ["lockstep", *words],
        cwd=clone,
        env={**environment(), "LOCKSTEP_TRACKING": "off"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def session_up(clone: Path) -> float:
    """Seconds until it has imported all and waits for its first stage."""
    began = time.monotonic()
    lockstep(clone, "session", "up")
    beat = clone / ".lockstep/sessions/main/001/heartbeat.json"
    while not (beat.exists() and json.loads(beat.read_text(encoding="utf-8"))["doing"] == "idle"):
        time.sleep(0.1)
    return round(time.monotonic() - began, 1)


def run_loop(clone: Path) -> dict[str, Any]:
    """How long the loop takes, and each of its stages from submission to the end of its job."""
    began = time.monotonic()
    lockstep(clone, "run", "policy_update@iter_003")
    whole = time.monotonic() - began
    stages: dict[str, list[float]] = {}
    for name in LOOP:
        stages[name] = []
        for record in sorted(clone.glob(f".lockstep/jobs/{name}@*/*/record.json")):
            ended = json.loads(record.read_text(encoding="utf-8"))["ended"]
            launch = record.parent / "attempts/001/launch.json"
            begun = json.loads(launch.read_text(encoding="utf-8"))["time"]
            stages[name].append(round(ended - begun, 1))
    return {"whole_s": round(whole, 1), "stages": stages}


if __name__ == "__main__":
    main()
