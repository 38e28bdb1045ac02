"""A finished run in a folder, as the report finds it: small numbers that are easy to recognise."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stages.context import Context
from stages.contracts.catalog import bind_all
from stages.contracts.params import Params
from stages.contracts.report import ReportConfig
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.schema import EvaluationRow
from stages.evaluation import folder, measures, tasks
from stages.evaluation.answers import Answer, Answered
from stages.evaluation.contest import contest
from stages.report import run


@dataclass(frozen=True)
class FinishedRun:
    """Inputs of the report on disk, and a way to make the report from them."""

    root: Path
    params: Params
    graph: list[dict[str, Any]] = field(default_factory=list)

    @property
    def inputs(self) -> dict[str, Path]:
        return {
            "iterations": self.root / "metrics/iterations",
            "evaluation_metrics": self.root / "metrics/evaluations",
            "evaluations": self.root / "artifacts/evaluations",
            "sft": self.root / "metrics/sft.json",
            "prepare": self.root / "metrics/prepare.json",
            "reward": self.root / "artifacts/rewards/reward_model",
        }

    def report(self, name: str = "report") -> tuple[str, str, dict[str, float]]:
        """The page, the summary and the metrics."""
        pages = self.root / name
        config = ReportConfig.from_params(self.params)
        assert isinstance(config, ReportConfig)
        job = self.root / "job"
        job.mkdir(exist_ok=True)
        ctx = Context(stage="report", key=None, seed=17, folder=job, graph=self.graph)
        metrics = run(config, self.inputs, {"report": pages}, ctx)
        page = (pages / "index.html").read_text(encoding="utf-8")
        return page, (pages / "summary.md").read_text(encoding="utf-8"), metrics

    def with_params(self, **sections: Any) -> "FinishedRun":
        return replace(self, params=Params.model_validate(sections))

    def evaluation(self, policy: str) -> dict[str, float]:
        """The held-out metrics of a policy."""
        numbers: dict[str, float] = json.loads(self._evaluation(policy).read_text())
        return numbers

    def samples(self, policy: str) -> list[dict[str, Any]]:
        """The rows of its greedy responses."""
        path = self.inputs["evaluations"] / policy / folder.GREEDY
        return [dict(row) for row in read_parquet(path, EvaluationRow)]

    def change_evaluation(self, policy: str, **values: object) -> None:
        change_json(self._evaluation(policy), **values)

    def change_samples(
        self, policy: str, change: Callable[[int, dict[str, Any]], Mapping[str, Any]]
    ) -> None:
        """Give each greedy response of a policy the values that `change` has for it."""
        rows = [row | change(i, row) for i, row in enumerate(self.samples(policy))]
        path = self.inputs["evaluations"] / policy / folder.GREEDY
        write_parquet(path, rows, EvaluationRow)

    def change_sample(self, policy: str, number: int, **values: object) -> None:
        self.change_samples(policy, lambda i, _: values if i == number else {})

    def _evaluation(self, policy: str) -> Path:
        return self.inputs["evaluation_metrics"] / f"{policy}.json"


class Page(HTMLParser):
    """What a browser would see: tags, attributes, and text outside style."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.style = ""
        self._inside: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        assert self._inside.pop() == tag, f"{tag} closes something else"

    def handle_data(self, data):
        if self._inside and self._inside[-1] == "style":
            self.style += data
        else:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.pieces)

    def rows(self, table: str) -> list[list[str]]:
        """Cells of the table with that class, as text."""
        body = re.search(rf'<table class="{table}">(.*?)</table>', self.source, re.DOTALL)
        assert body, f"no table {table}"
        return [
            [
                re.sub(r"<[^>]+>", " ", cell).strip()
                for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
            ]
            for row in re.findall(r"<tr.*?</tr>", body[1], re.DOTALL)
        ]


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_evaluation(
    path: Path, answered: list[Answered], reference: list[Answered] | None
) -> dict[str, float]:
    """The folder of an evaluation as the stage writes it, and the numbers that follow from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compared = contest(answered, reference) if reference else None
    folder.write(path, answered, compared, tasks.breakdown(answered, compared))
    return {
        **measures.quality(answered),
        **measures.by_chances(answered, [1, 2]),
        **measures.by_vote(answered),
        **(measures.against(answered, compared) if compared else {}),
    }


def graph_of(params: Params) -> list[dict[str, Any]]:
    """The graph that the control plane hands over, with hashes made up from the paths."""
    stages = bind_all(params)
    maker = {
        path: bound.address for bound in stages for path in (*bound.outs.values(), bound.metrics)
    }
    return [
        {
            "stage": bound.address,
            "deps": sorted(
                {
                    maker[path]
                    for needed in bound.inputs.values()
                    for path in maker
                    if path == needed or path.startswith(f"{needed}/")
                }
            ),
            "outs": {path: _digest(path) for path in bound.outs.values()},
        }
        for bound in stages
    ]


def _digest(path: str) -> str:
    digest = f"{sum((i + 1) * ord(c) ** 3 for i, c in enumerate(path)) * 7919**8:032x}"[-32:]
    return digest if "." in path else f"{digest}.dir"


def _evaluation(depth: int, lag: float) -> dict[str, float]:
    gain = depth - lag
    return {
        "accuracy": round(0.402 + 0.1003 * gain, 4),
        "reward_mean": round(-0.431 + 0.4507 * gain, 4),
        "reward_mean_error": 0.0312,
        "reward_std": round(0.91 - 0.08 * depth, 4),
        "kl_to_reference": round(0.0217 * depth**1.3, 4),
        "kl_to_reference_error": round(0.0021 * depth, 4),
        "entropy": round(0.412 - 0.061 * depth, 4),
        "response_length": round(21.37 + 0.51 * gain, 2),
        "truncation_rate": round(0.031 / (1 + depth), 4),
        "num_prompts": 256,
    }


def _training(depth: int, algorithm: str) -> dict[str, dict[str, float]]:
    update = {
        "policy_loss": -0.0113 - 0.001 * depth,
        "entropy": 0.39 - 0.05 * depth,
        "kl_to_reference": 0.019 * depth,
        "approx_kl": 0.00413,
        "clip_fraction_low": 0.021,
        "clip_fraction_high": 0.034,
        "ratio_min": 0.412,
        "ratio_max": 2.31,
        "advantage_std": 0.997,
        "grad_norm": 0.734,
        "logprob_gap_mean": 2.1e-07,
        "logprob_gap_max": 9.4e-06,
        "response_length": 21.6,
        "truncation_rate": 0.02,
        "reward_mean": -0.4 + 0.4 * depth,
        "reward_std": 0.9,
        "num_steps": 8,
    }
    if algorithm == "ppo":
        update |= {
            "value_loss": 0.318 / (1 + depth),
            "critic_grad_norm": 1.93,
            "explained_variance": 0.21 + 0.15 * depth,
        }
    else:
        update |= {"zero_variance_share": 0.137}
    return {
        "rollout": {
            "response_length": 21.6,
            "truncation_rate": 0.02,
            "entropy": 0.41 - 0.05 * depth,
            "num_sequences": 1024,
            "num_tokens": 22118,
        },
        "score": {
            "reward_mean": -0.4 + 0.4 * depth,
            "reward_mean_error": 0.0276,
            "reward_std": 0.9,
            "kl_to_reference": 0.019 * (depth - 1),
        },
        "policy_update": update,
    }


def _answered(
    share_right: float, reward: float, *, judged: bool, task: Callable[[int], str | None]
) -> list[Answered]:
    rows = []
    for number in range(256):
        a, b = 11 + number * 37 % 89, 10 + number * 53 % 90
        # A policy that is right more often is right on the same prompts and on more, but for a few.
        rank = number * 101 % 256
        slip = share_right > 0.5 and rank < 6
        correct = rank < share_right * 256 and not slip
        total = a + b if correct else a + b - (10 if number % 3 else 1)
        ones = f"{a % 10}+{b % 10}={a % 10 + b % 10}"
        tens = f"{a // 10}+{b // 10}={a // 10 + b // 10}"
        greedy = Answer(
            response=f"{ones}, {tens}, so {total}",
            finish_reason="stop",
            length=20 + number % 5,
            reward=reward + (1.2 if correct else -0.9) + 0.001 * (number % 17),
            correct=correct if judged else None,
            vote=str(total),
        )
        rows.append(
            Answered(
                prompt_id=f"held_out/{number:05d}",
                prompt=f"{a}+{b}=",
                answer=str(a + b) if judged else None,
                task=task(number),
                greedy=greedy,
                sampled=(greedy, replace(greedy, correct=number % 2 == 0 if judged else None)),
            )
        )
    return rows


@pytest.fixture
def finished_run(tmp_path: Path) -> Callable[..., FinishedRun]:
    """Makes a run: of the default params, or of those given."""

    def make(
        *,
        judged: bool = True,
        task: Callable[[int], str | None] = lambda _: None,
        **sections: Any,
    ) -> FinishedRun:
        params = Params.model_validate(sections)
        made = FinishedRun(tmp_path, params, graph_of(params))
        depths = {"sft": 0}
        reference: list[Answered] | None = None
        for name, iteration in params.rl.iterations.items():
            depths[name] = depths[iteration.policy] + 1
        for index, (policy, depth) in enumerate(depths.items()):
            lag = 0.8 if index > depth and policy != list(depths)[-1] else 0.0
            metrics = _evaluation(depth, lag)
            share = metrics.pop("accuracy")
            rows = _answered(share, metrics["reward_mean"], judged=judged, task=task)
            reference = reference or rows
            metrics |= write_evaluation(
                made.inputs["evaluations"] / policy, rows, reference if policy != "sft" else None
            )
            write_json(made.inputs["evaluation_metrics"] / f"{policy}.json", metrics)
            if policy != "sft":
                for stage, content in _training(depth, params.rl.algorithm.value).items():
                    write_json(made.inputs["iterations"] / policy / f"{stage}.json", content)
        write_json(made.inputs["sft"], {"loss": 0.2917, "num_steps": 188, "grad_norm": 0.51})
        write_json(
            made.inputs["prepare"],
            {"num_demonstrations": 3000, "num_prompts": 2000, "num_held_out": 256},
        )
        write_json(made.inputs["reward"] / "quality.json", {"pairwise_accuracy": 0.9375})
        return made

    return make
