"""A clone whose dvc.lock, cache and history DVC and git have made, around results made by hand.

No stage runs: outputs are written as stages write them, and `dvc commit` records them.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from dvc.repo import Repo

from stages.evaluation import folder, tasks
from stages.evaluation.answers import Answered
from stages.evaluation.contest import contest
from stages.evaluation.measures import quality

GRAPH = """\
stages:
  sft:
    cmd: echo sft
    deps: [given.txt]
    params: [sft]
    outs: [artifacts/policies/sft/model]
  policy_update:
    foreach: ${rl.iterations}
    do:
      cmd: echo ${key}
      deps:
        - artifacts/policies/${item.policy}/model
      params: [policy_update, rl.algorithm]
      outs:
        - artifacts/policies/${key}/model
  evaluate_sft:
    cmd: echo evaluate
    deps: [artifacts/policies/sft/model]
    outs: [artifacts/evaluations/sft]
    metrics:
      - metrics/evaluations/sft.json: {cache: false}
  evaluate:
    foreach: ${rl.iterations}
    do:
      cmd: echo ${key}
      deps:
        - artifacts/policies/${key}/model
      outs:
        - artifacts/evaluations/${key}
      metrics:
        - metrics/evaluations/${key}.json: {cache: false}
"""


class Recorded:
    """The clone, with what a test needs to write another state of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "dvc.yaml").write_text(GRAPH)
        (root / "given.txt").write_text("given")
        (root / ".gitignore").write_text("/artifacts/\n/.lockstep/\n")
        self.git("init", "-q", "-b", "main")
        Repo.init(str(root)).close()

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *who, *words], cwd=self.root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def params(self, learning_rate: float, *iterations: str) -> None:
        before = dict(zip(iterations, ("sft", *iterations), strict=False))
        values = {
            "sft": {"learning_rate": 0.001},
            "policy_update": {"learning_rate": learning_rate},
            "rl": {
                "algorithm": "grpo",
                "iterations": {name: {"policy": parent} for name, parent in before.items()},
            },
        }
        (self.root / "params.yaml").write_text(json.dumps(values))  # which is YAML

    def policy(
        self,
        name: str,
        answers: Sequence[Answered],
        reference: Sequence[Answered] | None = None,
        **numbers: float,
    ) -> None:
        """A policy with its evaluation."""
        model = self.root / "artifacts/policies" / name / "model"
        model.parent.mkdir(parents=True, exist_ok=True)
        model.write_text(f"{name} {answers} {numbers}")
        path = self.root / folder_of(name)
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        compared = contest(answers, reference) if reference else None
        folder.write(path, answers, compared, tasks.breakdown(answers, compared))
        metrics: Mapping[str, Any] = {**quality(answers), **numbers}
        summary = self.root / f"metrics/evaluations/{name}.json"
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.write_text(json.dumps(metrics))

    def record(self, message: str, tag: str | None = None) -> str:
        """Have DVC record the workspace, and git commit it; returns the commit."""
        with chdir(self.root), Repo() as repo:
            repo.commit(force=True)
        self.git("add", "-A", ".")
        self.git("commit", "-qm", message)
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")


def folder_of(policy: str) -> str:
    return f"artifacts/evaluations/{policy}"
