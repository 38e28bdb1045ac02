"""How often a large output is read and written, by whom, from its stage to the start of the next.

In a throwaway clone a made-up `sft` writes one file of random bytes, and a made-up `rollout` that
depends on it does nothing. Every process notes at its end what the kernel counted for it
(/proc/self/io, without what its children did): bytes read and written, from memory or disk, over
the size of the file. What a process reads besides, its libraries say, is below 0.1 of that.

    python benchmarks/file_bytes.py [--megabytes 2000] [--before REVISION] [--write]

  dvc repro      fresh processes, as DVC's users start them;
  lockstep run   with processes that are ready;
  said           the same as the first, with a stage that says the hash of what it wrote.

`--before` measures an earlier revision as well, which may not know how to be told a hash. `--write`
records the result in benchmarks/results/file_bytes.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from clones import environment, make_clone, set_params, write_code
from records import machine, report, versions
from warm import TINY

STAGES = ("sft", "rollout@iter_001")
NOTE = """
import atexit, json, os, sys

def _note():
    with open("/proc/self/io") as file:
        counts = {name: int(count) for name, count in (line.split(": ") for line in file)}
    with open("/proc/self/cmdline") as file:
        words = file.read().replace("\\0", " ").split() + sys.argv
    note = {"words": words, "parent": os.getppid(), "read": counts["rchar"],
            "written": counts["wchar"]}
    with open(f"NOTES/{os.getpid()}", "w") as file:
        json.dump(note, file)

def _exit(status, end=os._exit):
    _note()
    end(status)

atexit.register(_note)
os._exit = _exit
"""
WRITE = '''
"""A file of random bytes."""
import hashlib
import os
import random


def run(config, inputs, out, ctx):
    out["state"].mkdir()
    (out["state"] / "state.json").write_text("{}")
    out["model"].mkdir()
    path, hasher, draw = out["model"] / "weights", hashlib.md5(), random.Random(1)
    with path.open("wb") as file:
        for _ in range(MEGABYTES):
            block = draw.randbytes(10**6)
            hasher.update(block)
            file.write(block)
    if SAYS:
        ctx.wrote(path, hasher.hexdigest())
    return {"loss": 0.0}
'''
NOTHING = '''
"""A row of nothing."""


def run(config, inputs, out, ctx):
    out["rollouts"].write_text("nothing")
    return {"samples": 0}
'''
DVC = "import pipelines, sys; from dvc.cli import main; sys.exit(main(sys.argv[1:]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2000, help="the size of the file")
    parser.add_argument("--before", metavar="REVISION", help="an earlier one, to compare with")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    size = arguments.megabytes
    result: dict[str, Any] = {"megabytes": size}
    if arguments.before:
        result["before"] = {
            "revision": arguments.before,
            "dvc repro": measure(size, arguments.before),
            "lockstep run": measure(size, arguments.before, warm=True),
        }
    result |= {
        "dvc repro": measure(size),
        "lockstep run": measure(size, warm=True),
        "said": measure(size, says=True),
        "machine": machine(),
        "versions": versions("dvc", "dvc-data"),
    }
    report("file_bytes", result, to_file=arguments.write)


def measure(
    megabytes: int, revision: str | None = None, *, warm: bool = False, says: bool = False
) -> dict[str, Any]:
    """By stage: what each kind of process read and wrote."""
    with tempfile.TemporaryDirectory() as name:
        clone, notes = Path(name, "clone"), Path(name, "notes")
        clone.mkdir()
        notes.mkdir()
        make_clone(clone, revision)
        set_params(clone, TINY)
        write = WRITE.replace("MEGABYTES", str(megabytes)).replace("SAYS", str(says))
        write_code(clone, "stages/sft.py", write)
        write_code(clone, "stages/rollout.py", NOTHING)
        run(clone, warm=False, stage="prepare")
        with (clone / "pipelines/__init__.py").open("a", encoding="utf-8") as file:
            file.write(NOTE.replace("NOTES", str(notes)))
        found: dict[str, Any] = {}
        for stage in STAGES:
            run(clone, warm=warm, stage=stage)
            if warm:
                lockstep(clone, "down")
            found[stage] = times(notes, megabytes)
            for note in notes.iterdir():
                note.unlink()
        if warm:
            return found
        # All that DVC has recorded, as who reads every byte of it finds it.
        lockstep(clone, "verify", *STAGES)
        return found


def run(clone: Path, *, warm: bool, stage: str) -> None:
    if warm:
        lockstep(clone, "run", stage)
        return
    words = [sys.executable, "-c", DVC, "repro", "--single-item", stage]
    call(clone, words, LOCKSTEP_WARM="off")


def lockstep(clone: Path, *words: str) -> None:
    call(clone, [sys.executable, "-m", "pipelines", *words])


def call(clone: Path, words: list[str], **variables: str) -> None:
    own = {"PYTHONPATH": str(clone), "LOCKSTEP_TRACKING": "off", **variables}
    done = subprocess.run(
        words, cwd=clone, env={**environment(), **own}, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{words} exited {done.returncode}:\n{done.stdout}{done.stderr}")


def times(notes: Path, megabytes: int) -> dict[str, dict[str, float]]:
    """How often the file was read and written, by kind of process."""
    processes = {int(path.name): json.loads(path.read_text()) for path in notes.iterdir()}
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"read": 0.0, "written": 0.0})
    for pid, process in processes.items():
        children = [other for other in processes.values() if other["parent"] == pid]
        for what in ("read", "written"):
            own = process[what] - sum(child[what] for child in children)
            found[kind(process["words"])][what] += own / megabytes / 10**6
    return {
        name: {what: round(count, 2) for what, count in counts.items()}
        for name, counts in sorted(found.items())
        if max(counts.values()) > 0.2
    }


def kind(words: list[str]) -> str:
    if any("pipelines.worker" in word or "submitit" in word for word in words):
        return "worker"
    if "stage" in words:
        return "driver"
    return "dvc" if "repro" in words else "others"


if __name__ == "__main__":
    main()
