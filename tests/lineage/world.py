"""Stage runs and an index of them, built by hand, for the logic that needs no pipeline."""

import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from pipelines.base.repository import Repository
from pipelines.identity.code import version_of
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import Job, Lock, StageRun
from pipelines.lineage.target import Target
from stages.data.artifacts import write_parquet
from stages.data.seeds import content_id

MODEL = "artifacts/policies/iter_002/model"
HERE = {"cpu": "Neoverse", "threads": "1", "host": "a", "packages": {"torch": "2.13.0"}}


def git(root: Path, *words: str) -> str:
    """What it prints."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *who, *words], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


class Page(HTMLParser):
    """A page that runs nothing and fetches nothing, whose tags are all closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []
        assert not self.tags & {"script", "img", "iframe"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name == "src"]
        assert not [value for _, value in attrs if (value or "").startswith(("http", "//"))]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def digest(text: str) -> str:
    """A hash that says what it stands for."""
    return text.encode().hex().ljust(32, "0")[:32]


def stage_run(
    stage: str,
    inputs: Mapping[str, str],
    outs: Mapping[str, str],
    *,
    params: Mapping[str, Any] | None = None,
    code: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = HERE,
    earlier: tuple[Mapping[str, Any], ...] = (),
) -> StageRun:
    code = code or {"stages/x.py": "1"}
    job = Job(
        "entry",
        "published",
        "c0ffee",
        environment=environment or {},
        earlier_environments=earlier,
        ended=1.0,
    )
    return StageRun(
        stage=stage,
        params=params or {"seed": 17},
        inputs=inputs,
        code=code,
        code_version=version_of(code),
        outs=outs,
        jobs=(job,) if environment is not None else (),
        in_workspace=True,
    )


def lock(name: str, *stage_runs: StageRun) -> Lock:
    return Lock(name, {item.stage: item for item in stage_runs})


def run_index(*locks: Lock, more: tuple[StageRun, ...] = ()) -> RunIndex:
    """The first lock is the workspace's."""
    found = {id(item): item for each in locks for item in each.stages.values()}
    return RunIndex(
        [*found.values(), *more],
        locks[0] if locks else None,
        {each.name: each for each in locks[1:]},
    )


def target(made: StageRun, path: str | None = None, inside: Lock | None = None) -> Target:
    artifact = Artifact(path, made.outs[path]) if path else None
    return Target(path or made.stage, artifact, made, inside)


def chain(
    *, learning_rate: float = 0.1, data: str = "d", mark: str = "", **changes: Any
) -> tuple[StageRun, StageRun, StageRun]:
    """prepare, sft and an evaluation; `mark` makes the outputs of sft and what follows others."""
    prepare = stage_run(
        "prepare",
        {"data": digest(f"data{data}")},
        {"artifacts/data/demonstrations.parquet": digest(f"demo{data}")},
    )
    sft = stage_run(
        "sft",
        dict(prepare.outs),
        {"artifacts/policies/sft/model": digest(f"model{data}{learning_rate}{mark}")},
        params={"seed": 17, "sft.learning_rate": learning_rate},
        **changes,
    )
    evaluation = stage_run(
        "evaluate_sft",
        dict(sft.outs),
        {"artifacts/evaluations/sft": digest(f"eval{data}{learning_rate}{mark}")},
    )
    return prepare, sft, evaluation


class Files:
    """A clone's folder with Parquet files in it, which are named by their hashes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hashes: dict[str, str] = {}

    def write(self, path: str, rows: list[dict[str, Any]], kind: Any) -> str:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(file, rows, kind)
        self.hashes[path] = HashCache().of(file)
        return self.hashes[path]

    def of(self, *paths: str) -> dict[str, str]:
        return {path: self.hashes[path] for path in paths}

    def content(self, found: RunIndex) -> Content:
        return Content(Repository(self.root), found)


def rollout_row(prompt: str, index: int, response: str, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_id": content_id(prompt),
        "sample_index": index,
        "greedy": False,
        "prompt": prompt,
        "response": response,
        "answer": None,
        "extra": "{}",
        "prompt_ids": [1],
        "response_ids": [2, 3],
        "logprobs": [-0.5, -0.25],
        "support": None,
        "seed": 100 + index,
        "finish_reason": "stop",
        "policy_hash": "f" * 64,
        **changes,
    }


def score_row(prompt: str, index: int, reward: float) -> dict[str, Any]:
    return {
        "prompt_id": content_id(prompt),
        "sample_index": index,
        "reward": reward,
        "by_source": [("reward_model", reward - 1)],
        "ref_logprobs": [-0.5, -0.25],
    }


def experience_row(prompt: str, index: int, role: str, **changes: Any) -> dict[str, Any]:
    given = {"reward": 1.0, "advantages": [0.5, -0.5], **changes}
    return {"prompt_id": content_id(prompt), "sample_index": index, "role": role, **given}


def demonstration_row(prompt: str, completion: str) -> dict[str, Any]:
    return {
        "prompt_id": content_id(prompt),
        "prompt": prompt,
        "completion": completion,
        "answer": None,
        "extra": "{}",
        "prompt_ids": [1],
        "completion_ids": [2],
    }


def preference_row(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "prompt_id": content_id(prompt),
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "answer": None,
        "margin": None,
        "prompt_ids": [1],
        "chosen_ids": [2],
        "rejected_ids": [3],
    }
