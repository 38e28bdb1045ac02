"""A DVC project of four stages that take no time: a, then b and c beside one another, then d."""

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

DVC_YAML = """\
stages:
  a:
    cmd: python tiny_stage.py a
    deps: [input]
    outs: [out/a]
  b:
    cmd: python tiny_stage.py b
    deps: [out/a]
    outs: [out/b]
  c:
    cmd: python tiny_stage.py c
    deps: [out/a, input_of_c]
    outs: [out/c]
  d:
    cmd: python tiny_stage.py d
    deps: [out/b, out/c]
    outs: [out/d]
"""


@dataclass(frozen=True)
class TinyProject:
    """The project's folder, and what its stages noted about themselves."""

    root: Path

    def behave(self, **stages: dict[str, Any]) -> None:
        (self.root / "behaviour.json").write_text(json.dumps(stages))

    def forget(self) -> None:
        """Make every stage stale and drop what was noted."""
        for path in ("out", "dvc.lock", "events.jsonl", ".dvc/cache", ".lockstep/jobs"):
            target = self.root / path
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def events(self, event: str) -> list[dict[str, Any]]:
        path = self.root / "events.jsonl"
        whole, _, _being_written = (path.read_text() if path.exists() else "").rpartition("\n")
        lines = map(json.loads, whole.splitlines())
        return [line for line in lines if line["event"] == event]

    def started(self) -> list[str]:
        return [event["stage"] for event in self.events("start")]

    def overlap(self, one: str, other: str) -> bool:
        """Whether the two stages ran at the same time."""
        start = {event["stage"]: event["time"] for event in self.events("start")}
        end = {event["stage"]: event["time"] for event in self.events("end")}
        return start[one] < end[other] and start[other] < end[one]


def make_project(root: Path) -> TinyProject:
    shutil.copytree(_template(), root)
    project = TinyProject(root)
    project.behave()
    return project


@cache
def _template() -> Path:
    """What projects are copied from: made once in each test process."""
    folder = tempfile.TemporaryDirectory(prefix="lockstep-tiny-")
    atexit.register(folder.cleanup)
    root = Path(folder.name)
    (root / "slurm_profiles").mkdir()
    (root / "dvc.yaml").write_text(DVC_YAML)
    (root / "params.yaml").write_text("seed: 17\n")
    (root / "input").write_text("1")
    (root / "input_of_c").write_text("1")
    (root / "slurm_profiles/local.yaml").write_text("executor: local\nparallel: 2\n")
    (root / "slurm_profiles/serial.yaml").write_text("executor: local\nparallel: 1\n")
    shutil.copy(HERE / "tiny_stage.py", root)
    # The flow is loaded from the project's own files, as in any clone.
    for package in ("pipelines", "stages"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, root / package, ignore=ignored)
    for command in (["git", "init", "--quiet"], [sys.executable, "-m", "dvc", "init", "--quiet"]):
        subprocess.run(command, cwd=root, check=True)
    shutil.copy(REPOSITORY / ".dvc/config", root / ".dvc/config")
    return root
