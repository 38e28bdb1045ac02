"""What `lockstep lineage` costs: with the shipped graph alone, and over a history of 500 commits.

The records are made up, in DVC's own form: the shipped graph with its 3 iterations, and for each
commit new results of one iteration and all that follow it. Nothing is computed. Seconds are CPU
seconds of the command and of the git processes it starts, so that other work on the machine does
not count.

    python benchmarks/lineage.py [--commits 500] [--rounds 5] [--write]

`--write` records the result in benchmarks/results/lineage.json.
"""

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from clones import environment, make_clone
from records import machine, report, versions

from pipelines.identity.code import map_path
from stages.contracts.catalog import BoundStage, bind_all
from stages.contracts.params import Params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commits", type=int, default=500, help="length of the history")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    measured = {}
    for name, commits in (("one_commit", 1), ("history", arguments.commits)):
        with tempfile.TemporaryDirectory() as folder:
            clone = make_clone(Path(folder))
            size = add_history(clone, commits)
            measured[name] = {
                "commits": commits,
                "lock_bytes": size,
                "up_cpu_s": time_command(clone, arguments.rounds, "policy@iter_003"),
                "down_cpu_s": time_command(clone, arguments.rounds, "policy@sft", "--down"),
            }
    result = {
        **measured,
        "rounds": arguments.rounds,
        "machine": machine(),
        "versions": {
            **versions("pydantic", "ruamel.yaml"),
            "git": subprocess.check_output(
                ["git", "--version"], encoding="utf-8", errors="replace"
            ).split()[-1],
        },
    }
    report("lineage", result, to_file=arguments.write)


def add_history(clone: Path, commits: int) -> int:
    """Commit so many versions of dvc.lock; returns the size of one."""
    nodes = bind_all(Params())
    version = dict.fromkeys((node.address for node in nodes), 0)
    keys = list(dict.fromkeys(node.key for node in nodes if node.key and "@" in node.address))
    stream = []
    text = ""
    for number in range(commits):
        changed = keys[number % len(keys) :] if number else [None, *keys]
        for node in nodes:
            if node.key in changed or node.address == "report" or not number:
                version[node.address] = number
        made = {p: version[n.address] for n in nodes for p in (*n.outs.values(), n.metrics)}
        text = "schema: '2.0'\nstages:\n" + "".join(
            block(node, made, version[node.address]) for node in nodes
        )
        stream.append(
            f"commit refs/heads/history\ncommitter b <b@example.org> {1_700_000_000 + number} "
            f"+0000\ndata 1\n.\nM 100644 inline dvc.lock\ndata {len(text)}\n{text}\n"
        )
    subprocess.run(
        ["git", "fast-import", "--quiet"], cwd=clone, input="".join(stream).encode(), check=True
    )
    (clone / "dvc.lock").write_text(text, encoding="utf-8")
    return len(text)


def block(node: BoundStage, made: dict[str, int], version: int) -> str:
    """A stage's record as DVC writes it."""
    params = json.loads(node.config.model_dump_json(by_alias=True))
    lines = [
        f"  {node.address}:",
        f"    cmd: python -m pipelines stage {node.address}",
        "    deps:",
    ]
    for path in [*dict.fromkeys(node.inputs.values()), map_path(node.stage.module)]:
        lines += item(path, made.get(path, 0))
    lines += ["    params:", "      params.yaml:"]
    lines += [f"        {key}: {json.dumps(value)}" for key, value in params.items()]
    lines.append("    outs:")
    for path in (*node.outs.values(), node.metrics):
        lines += item(path, version)
    return "\n".join(lines) + "\n"


def item(path: str, version: int) -> list[str]:
    digest = hashlib.md5(f"{path} {version}".encode()).hexdigest()
    return [f"    - path: {path}", "      hash: md5", f"      md5: {digest}", "      size: 1"]


def time_command(clone: Path, rounds: int, *words: str) -> float:
    """The median CPU seconds of a command."""
    taken = []
    for _ in range(rounds + 1):
        before = used()
        subprocess.run(
            [sys.executable, "-m", "pipelines", "lineage", *words],
            cwd=clone,
            env=environment(),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        taken.append(used() - before)
    return round(statistics.median(taken[1:]), 2)


def used() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
