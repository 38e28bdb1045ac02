"""score with named sources: each is kept by itself, and their sum is that by hand."""

import json
import math
import shutil
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stages.context import Context, ShareDone, StageError
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.reward_source import run as make_source
from stages.rewards.paid import PaidScorer
from stages.rewards.source import load_source, rewards_from
from stages.score import run as run_score
from tests.waiting import FOR_EVER_S, must_not_wait

MINE = "def level(responses, level):\n    return [float(x) for x in level]\n"
SOURCES = {
    "right": {"kind": "maths"},
    "short": {"kind": "length", "unit": "words", "target": 1, "width": 4, "side": "longer"},
    "mine": {"kind": "function", "function": "mine:level", "batch_size": 2},
}
RESPONSES = ["4", "it is 4", "it is 5", "no"]


class Project:
    """Rollouts of two prompts, two responses each, and a folder of functions."""

    def __init__(self, root: Path, **params) -> None:
        self.root = root
        self.params = Params.model_validate(
            {"rewards": SOURCES, "rl": {"reward": "right"}, **params}
        )
        (root / "rewards").mkdir(parents=True, exist_ok=True)
        (root / "rewards/mine.py").write_text(MINE)
        bound = bind("score@iter_001", self.params)
        self.inputs = {name: root / path for name, path in bound.inputs.items()}
        self.outs = {name: root / path for name, path in bound.outs.items()}
        self.config = bound.config
        self.inputs["rollouts"].parent.mkdir(parents=True, exist_ok=True)
        self.outs["scores"].parent.mkdir(parents=True, exist_ok=True)
        write_parquet(self.inputs["rollouts"], rollouts(), schema.RolloutRow)

    def context(self, **options) -> Context:
        folder = self.root / "job"
        folder.mkdir(exist_ok=True)
        return Context(stage="score@iter_001", key="iter_001", seed=1, folder=folder, **options)

    def score(self, **options) -> dict:
        return run_score(self.config, self.inputs, self.outs, self.context(**options))

    @property
    def scores(self) -> list[dict]:
        return read_parquet(self.outs["scores"], schema.ScoreRow)


def rollouts() -> list[dict]:
    known = schema.columns_of(schema.RolloutRow).names
    rows = []
    for index, response in enumerate(RESPONSES):
        row = {
            "prompt_id": f"p{index // 2}",
            "sample_index": index % 2,
            "greedy": False,
            "prompt": "2 + 2",
            "response": response,
            "answer": "4",
            "extra": json.dumps({"level": index}),
            "prompt_ids": [1, 2],
            "response_ids": [3] * (index + 1),
            "logprobs": [-0.5] * (index + 1),
            "support": None,
            "seed": 0,
            "finish_reason": "stop",
            "policy_hash": "x",
        }
        rows.append({name: row.get(name) for name in known})
    return rows


WEIGHTS = {"right": 2.0, "short": 0.5, "mine": -1.0}
WITHOUT_MODELS = {"reference": False}
KL = {"policy_update": {"kl_coef": 0.0, "critic": "policy"}}


def test_weighted_sums_by_hand(tmp_path) -> None:
    project = Project(tmp_path, score={**WITHOUT_MODELS, "weights": WEIGHTS}, **KL)
    metrics = project.score()
    right, short, mine = [1, 1, 0, 0], [1.0, 0.5, 0.5, 1.0], [0, 1, 2, 3]
    expected = [2 * r + 0.5 * s - m for r, s, m in zip(right, short, mine, strict=True)]
    assert [row["reward"] for row in project.scores] == expected == [2.5, 1.25, -1.75, -2.5]
    said = [dict(row["by_source"]) for row in project.scores]
    assert [row["right"] for row in said] == right
    assert [row["short"] for row in said] == short
    assert [row["mine"] for row in said] == mine
    assert metrics["reward_mean/mine"] == 1.5
    assert metrics["reward_std/right"] == 0.5
    assert metrics["reward_mean"] == -0.125
    # Two prompts, with means of 1.875 and -2.125, and by `mine` of 0.5 and 2.5.
    assert metrics["reward_mean_error"] == pytest.approx(2.0)
    assert metrics["reward_mean_error/mine"] == pytest.approx(1.0)
    assert metrics["reward_std"] == pytest.approx(
        math.sqrt(sum((x + 0.125) ** 2 for x in expected) / 4)
    )


def test_a_name_in_rl_reward_scores_alone_and_needs_no_reward_model(tmp_path) -> None:
    project = Project(tmp_path, score=WITHOUT_MODELS, **KL)
    assert project.inputs["reward"] == tmp_path / "artifacts/rewards/right"
    project.score()
    assert [row["reward"] for row in project.scores] == [1, 1, 0, 0]
    assert [row["by_source"] for row in project.scores] == [[("right", x)] for x in (1, 1, 0, 0)]


def test_shards_and_a_kill_leave_the_same_bytes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("stages.rewards.named.UNIT_ROWS", 1)
    params = {"score": {**WITHOUT_MODELS, "weights": WEIGHTS}, **KL}
    alone = Project(tmp_path / "alone", **params)
    alone.score()
    shared = Project(tmp_path / "shared", **params)
    (shared.root / "rewards/mine.py").write_text(
        "def level(level):\n    return [1 // (2 - level[0])]\n"
    )
    with pytest.raises(StageError, match="p1, sample 0"):
        shared.score(shard=0, num_shards=2)
    shutil.rmtree(shared.root / "job/scratch/parts/rewards-mine")
    (shared.root / "rewards/mine.py").write_text(MINE)
    with pytest.raises(ShareDone):
        shared.score(shard=0, num_shards=2)
    shared.score(shard=1, num_shards=2)
    assert shared.outs["scores"].read_bytes() == alone.outs["scores"].read_bytes()


@must_not_wait
def test_a_model_that_fails_does_not_wait_for_a_function(tmp_path) -> None:
    """The reference is missing, and the function would sleep for an hour."""
    params = {"score": {"weights": {"mine": 1.0}}}
    slow = {"mine": {"kind": "function", "function": "mine:level", "timeout": FOR_EVER_S}}
    project = Project(tmp_path, rewards={**SOURCES, **slow}, **params)
    text = "import time\ndef level(level):\n    time.sleep(4000)\n"
    (tmp_path / "rewards/mine.py").write_text(text)
    with pytest.raises(Exception, match="policies/sft/model"):
        project.score()


def test_a_model_waits_for_the_other_models_and_a_rule_for_nobody(tmp_path, monkeypatch) -> None:
    threads = {}

    def opened(_ctx, source, *_rows_and_what_is_kept):
        threads[source.name] = threading.current_thread() is threading.main_thread()
        return PaidScorer(source.name)

    monkeypatch.setattr("stages.rewards.named.open_scorer", opened)
    monkeypatch.setattr(PaidScorer, "score", lambda _, rows: [0.0 for _ in rows])
    given = {"kind": "model", "folder": "judge"}
    weights = {"right": 1.0, "given": 1.0}
    score = {**WITHOUT_MODELS, "weights": weights}
    Project(tmp_path, rewards={**SOURCES, "given": given}, score=score, **KL).score()
    assert threads == {"right": False, "given": True}


def test_a_source_is_kept_with_its_functions_and_scores_from_there(tmp_path) -> None:
    project = Project(tmp_path)
    kept = tmp_path / "artifacts/rewards/mine"
    kept.parent.mkdir(parents=True)
    bound = bind("reward_source@mine", project.params)
    assert bound.outs == {"source": "artifacts/rewards/mine"}
    ctx = Context(stage="reward_source@mine", key="mine", seed=1, folder=tmp_path)
    make_source(bound.config, {"functions": tmp_path / "rewards"}, {"source": kept}, ctx)
    (tmp_path / "rewards/mine.py").write_text("def level(level):\n    return [9.0] * len(level)\n")
    source = load_source("mine", kept)
    work = rewards_from(
        source, project.context(), "rewards-mine", rollouts(), project.config.precision
    )
    from stages.engines.processes.parts import collect, fill

    fill(project.context(), work)
    assert collect(project.context(), work) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"kind": "function", "function": "gone:f"}, "there is no file"),
        ({"kind": "function", "function": "mine:gone"}, "has no function gone"),
        ({"kind": "json_schema", "definition": {"type": "objekt"}}, "no JSON schema"),
        ({"kind": "json_schema", "file": "gone.json"}, "gone.json"),
        ({"kind": "judge", "url": "http://x", "model": "m", "file": "gone.txt"}, "gone.txt"),
    ],
)
def test_a_source_that_could_score_nothing_is_refused_at_once(tmp_path, source, said) -> None:
    project = Project(tmp_path, rewards={"right": {"kind": "maths"}, "bad": source})
    bound = bind("reward_source@bad", project.params)
    ctx = Context(stage="reward_source@bad", key="bad", seed=1, folder=tmp_path)
    with pytest.raises(StageError) as caught:
        make_source(
            bound.config, {"functions": tmp_path / "rewards"}, {"source": tmp_path / "out"}, ctx
        )
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_scores_keep_their_schema(tmp_path) -> None:
    project = Project(tmp_path, score=WITHOUT_MODELS, **KL)
    project.score()
    assert pq.read_schema(project.outs["scores"]).names == schema.columns_of(schema.ScoreRow).names
