"""Throwaway copies of the working tree to measure in."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]


def make_clone(folder: Path, revision: str | None = None) -> Path:
    """The working tree, or a revision, as a repository of its own, without results."""
    if revision is None:
        copy_working_tree(folder)
    else:
        packed = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    identity = ["-c", "user.name=benchmark", "-c", "user.email=benchmark@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)
    return folder


def copy_working_tree(folder: Path) -> None:
    """Every file that git tracks or would track, without results."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("metrics/", "dvc.lock")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def copy_clone(source: Path, target: Path) -> Path:
    """A clone with its repository and its results; a program copies thousands of files faster.

    What is one file under several names becomes several, as on another disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    words = ["cp", "-R", "-P", "--preserve=mode,ownership,timestamps"]
    subprocess.run([*words, source, target], check=True)
    return target


def set_params(clone: Path, changes: Mapping[str, Any]) -> None:
    """Change params.yaml, by dotted key."""
    yaml = YAML()
    params = yaml.load(clone / "params.yaml")
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = params
        for section in sections:
            place = place[section]
        place[name] = value
    yaml.dump(params, clone / "params.yaml")


def write_code(clone: Path, name: str, text: str) -> None:
    """Give a file of the stages other text, and have the code maps follow."""
    (clone / name).write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", "pipelines", "code"]
    subprocess.run(words, cwd=clone, env=environment(), check=True)


def environment() -> dict[str, str]:
    """As after activating the environment that this Python belongs to."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "LOCKSTEP_"))}
    return {**kept, "PATH": path}
