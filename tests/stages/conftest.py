"""Tiny inputs that the stages' tests share: little data, and a model of a few thousand weights."""

import importlib
import json
import shutil
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.context import Context
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.data import batching

TINY = {
    "model": {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2},
    "prepare": {
        "digits": 2,
        "demonstrations": 96,
        "preferences": 64,
        "prompts": 40,
        "held_out": 16,
    },
    "sft": {"epochs": 1, "batch_size": 16},
    "reward_model": {"epochs": 1, "batch_size": 16},
    "rollout": {"prompts": 6, "samples": 3, "max_new_tokens": 12, "batch_size": 8},
    "policy_update": {"epochs": 1, "batch_size": 9},
    "evaluate": {"samples": 2, "pass_at": [1, 2]},
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def rewrite_weights(path: Path, change) -> None:
    """Change the tensors of a file in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def everything(learner) -> dict[str, torch.Tensor]:
    """All that a learner holds, of which it alone has all."""
    return {name: learner.whole(name).clone() for name in learner.held()}


class Interrupted(Context):
    """Asks itself to stop after so many steps, as a signal would."""

    stop_after = 10**9

    def log(self, step, metrics):
        super().log(step, metrics)
        if step >= self.stop_after:
            self.request_stop()


class Runner:
    """Runs stages in a folder, one after another, as the worker would."""

    def __init__(self, root: Path, **changes: dict) -> None:
        self.root = root
        values = {
            key: {**TINY.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in {**{name: {} for name in TINY}, **changes}.items()
        }
        self.params = Params.model_validate(values)
        for folder in ("data", "models", "rewards", "environments", "tool_answers"):
            (root / folder).mkdir(parents=True, exist_ok=True)

    def paths(self, address: str) -> tuple[dict[str, Path], dict[str, Path]]:
        bound = bind(address, self.params)
        return (
            {name: self.root / path for name, path in bound.inputs.items()},
            {name: self.root / path for name, path in bound.outs.items()},
        )

    def context(self, address: str, **options) -> Context:
        folder = self.root / "jobs" / address
        folder.mkdir(parents=True, exist_ok=True)
        key = bind(address, self.params).key
        return Context(stage=address, key=key, seed=self.params.seed, folder=folder, **options)

    def run(self, address: str, ctx: Context | None = None) -> dict:
        bound = bind(address, self.params)
        inputs, outs = self.paths(address)
        for path in outs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        ctx = ctx or self.context(address)
        metrics = importlib.import_module(bound.stage.module).run(bound.config, inputs, outs, ctx)
        shutil.rmtree(ctx.scratch)
        return metrics

    def run_iterations(self, *names: str) -> dict:
        """Rollout, score and update of each; what the last update said."""
        for name in names:
            for stage in ("rollout", "score", "policy_update"):
                metrics = self.run(f"{stage}@{name}")
        return metrics

    def rows(self, name: str) -> list[dict]:
        """Of an artifact in Parquet."""
        return pq.read_table(self.root / f"artifacts/{name}.parquet").to_pylist()

    def rewrite(self, name: str, change) -> None:
        """Change columns of every row of an artifact."""
        path = self.root / f"artifacts/{name}.parquet"
        table = pq.read_table(path)
        changed = [row | change(row) for row in table.to_pylist()]
        pq.write_table(table.from_pylist(changed, schema=table.schema), path)

    def steps(self, address: str) -> list[dict]:
        """The metrics of each step of a stage."""
        lines = (self.root / "jobs" / address / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"] for line in lines]

    @staticmethod
    def contents(path: Path) -> dict[str, bytes]:
        """Every file under a folder, or the file itself, by name."""
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture
def runner(tmp_path):
    """A factory of runners, each in a folder of its own."""
    return lambda name="run", **changes: Runner(tmp_path / name, **changes)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run up to the first iteration's scores, with its metrics. Not to be written to."""
    runner = Runner(tmp_path_factory.mktemp("trained"))
    stages = ["prepare", "sft", "reward_model", "rollout@iter_001", "score@iter_001"]
    runner.metrics = {address: runner.run(address) for address in stages}
    return runner


@pytest.fixture
def copied(trained, tmp_path):
    """A factory of copies of the trained run, under other params where asked, to go on from."""

    def copy(name="copy", **changes):
        made = Runner(tmp_path / name, **changes)
        shutil.copytree(trained.root, made.root, dirs_exist_ok=True)
        return made

    return copy


def gone_on(trained, root, addresses, changes, micro_tokens=8192):
    """A copy of the trained run, under other params, with these stages run again."""
    changes = {**changes, "rl": {"teacher": "artifacts/base", **changes.get("rl", {})}}
    copy = Runner(root, **changes)
    shutil.copytree(trained.root, root, dirs_exist_ok=True)
    metrics = {}
    for address in addresses:
        for path in (*copy.paths(address)[1].values(), copy.root / "jobs" / address):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
        metrics = copy.run(address, copy.context(address, micro_tokens=micro_tokens))
    return copy, metrics


@pytest.fixture
def go_on(trained, tmp_path):
    return lambda name, *asked, **how: gone_on(trained, tmp_path / name, *asked, **how)


@pytest.fixture
def in_double(monkeypatch):
    """What is padded, and what is made anew, is in float64."""
    monkeypatch.setattr(batching.pad, "__defaults__", (torch.float64,))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class OneVllm:
    """The one vLLM that a process can have; whoever asks gets it with the weights of a folder."""

    def __init__(self):
        self.generator = None

    def __call__(self, folder):
        if self.generator is not None:
            self.generator.load(folder)
            return self.generator
        from stages.chat.streaming_vllm import StreamingVllm
        from stages.engines.generation.generator import GeneratorSettings

        # It is one like any other until it is asked to stream.
        self.generator = StreamingVllm(folder, GeneratorSettings("cpu", Precision.FLOAT32, 4))
        self.close_it = self.generator.close
        self.generator.close = lambda: None
        return self.generator

    def close(self):
        if self.generator is not None:
            self.close_it()
            self.generator = None


@pytest.fixture(scope="session")
def one_vllm():
    with closing(OneVllm()) as one:
        yield one
