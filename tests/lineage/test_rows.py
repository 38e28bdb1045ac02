"""From a model to the rows that trained it, and from a prompt to the models."""

import shutil
import sys
from pathlib import Path

import pytest

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import MissingArtifact
from pipelines.lineage.page import prompt_page, rows_page
from pipelines.lineage.prompts import Influence, trace
from pipelines.lineage.row_changes import compare_rows
from pipelines.lineage.rows import Rows, rows_of, select
from pipelines.lineage.rows_text import render_influence, render_rows
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import StageRun
from stages.data import schema
from stages.data.seeds import content_id
from tests.lineage.conftest import HOSTILE
from tests.lineage.world import (
    Files,
    Page,
    demonstration_row,
    experience_row,
    lock,
    preference_row,
    rollout_row,
    run_index,
    score_row,
    stage_run,
)

ROLLOUTS = "artifacts/rollouts/iter_001.parquet"
SCORES = "artifacts/scores/iter_001.parquet"
EXPERIENCE = "artifacts/policies/iter_001/experience.parquet"
SFT = "artifacts/policies/sft/model"
REWARD = "artifacts/rewards/reward_model"
MODEL = "artifacts/policies/iter_001/model"
DEMONSTRATIONS = "artifacts/data/demonstrations.parquet"
PREFERENCES = "artifacts/data/preferences.parquet"
HELD_OUT = "artifacts/data/held_out.parquet"
PROMPTS = "artifacts/data/prompts.parquet"
A, B, C = "1+1=", HOSTILE, "never drawn"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Two prompts of two samples and a greedy one each; only three samples were trained on."""
    files = Files(tmp_path)
    rollouts, scores = [], []
    for prompt in sorted((A, B), key=content_id):
        for index in range(3):
            rollouts.append(rollout_row(prompt, index, f"{index}", greedy=index == 2))
            scores.append(score_row(prompt, index, float(index)))
    files.write(ROLLOUTS, rollouts, schema.RolloutRow)
    files.write(SCORES, scores, schema.ScoreRow)
    used = [(A, 0), (A, 1), (B, 1)]
    files.write(
        EXPERIENCE,
        [experience_row(prompt, index, "policy_gradient") for prompt, index in used],
        schema.ExperienceRow,
    )
    files.write(
        DEMONSTRATIONS,
        [demonstration_row(A, "2"), demonstration_row(A, "two")],
        schema.DemonstrationRow,
    )
    files.write(PREFERENCES, [preference_row(B, "good", "bad")], schema.PreferenceRow)
    prompts = [
        {"prompt_id": content_id(p), "prompt": p, "prompt_ids": [1], "answer": None, "extra": "{}"}
        for p in (A, B, C)
    ]
    files.write(PROMPTS, prompts, schema.PromptRow)
    files.write(HELD_OUT, prompts[2:], schema.PromptRow)
    return files


def update(files: Files, *, experience: bool = True, **params: object) -> StageRun:
    outs = {MODEL: "m1", **(files.of(EXPERIENCE) if experience else {})}
    inputs = {**files.of(ROLLOUTS, SCORES, DEMONSTRATIONS), SFT: "m0", REWARD: "r"}
    return stage_run("policy_update@iter_001", inputs, outs, params={"seed": 17, **params})


def rollout(files: Files) -> StageRun:
    return stage_run("rollout@iter_001", {SFT: "m0"}, files.of(ROLLOUTS))


def world(files: Files) -> RunIndex:
    """sft on A; a reward model on B; an iteration on A and B; one more iteration without either."""
    prepare = stage_run("prepare", {}, files.of(DEMONSTRATIONS, PREFERENCES, PROMPTS, HELD_OUT))
    sft = stage_run("sft", files.of(DEMONSTRATIONS), {SFT: "m0"})
    reward = stage_run("reward_model", files.of(PREFERENCES), {REWARD: "r"})
    score = stage_run("score@iter_001", {**files.of(ROLLOUTS), REWARD: "r"}, files.of(SCORES))
    evaluation = stage_run(
        "evaluate@iter_001",
        {MODEL: "m1", **files.of(HELD_OUT)},
        {"artifacts/evaluations/iter_001": "e"},
    )
    gone = "artifacts/policies/iter_002/experience.parquet"
    child = stage_run(
        "policy_update@iter_002",
        {MODEL: "m1"},
        {"artifacts/policies/iter_002/model": "m2", gone: "0" * 32},
    )
    stages = (prepare, sft, reward, rollout(files), score, update(files), evaluation, child)
    return run_index(lock("workspace", *stages))


def rows(files: Files, made: StageRun) -> Rows:
    found = run_index(lock("workspace", rollout(files), made))
    return rows_of(files.content(found), made)


def test_a_policy_has_exactly_the_rows_that_its_update_used(files: Files) -> None:
    found = rows(files, update(files))
    assert {(row["prompt"], row["sample_index"]) for row in found.rows} == {(A, 0), (A, 1), (B, 1)}
    row = next(row for row in found.rows if row["prompt"] == B)
    assert row == {
        "prompt_id": content_id(B),
        "step": None,
        "sample_index": 1,
        "role": "policy_gradient",
        "prompt": B,
        "response": "1",
        "reward": 1.0,
        "by_source": {"reward_model": 0.0},
        "advantages": [0.5, -0.5],
        "seed": 101,
        "policy_hash": "m0",  # as dvc.lock and `lineage` know the policy
        "source": None,
    }
    assert found.notes == []


def test_without_a_list_of_what_was_used_all_samples_are_shown_and_it_is_said(files: Files) -> None:
    found = rows(files, update(files, experience=False))
    assert len(found.rows) == 4  # the greedy responses are not learnt from
    assert {row["advantages"] for row in found.rows} == {None}
    assert {row["reward"] for row in found.rows} == {0.0, 1.0}
    assert "without their advantages" in found.notes[0]


def test_chosen_demonstrations_are_rows_too(files: Files) -> None:
    files.write(
        EXPERIENCE, [experience_row(A, 0, "rejected", advantages=None)], schema.ExperienceRow
    )
    made = update(files, **{"rl.algorithm": "dpo", "policy_update.chosen": "demonstrations"})
    assert [(row["role"], row["response"]) for row in rows(files, made).rows] == [
        ("chosen", "2"),
        ("chosen", "two"),
        ("rejected", "0"),
    ]


def test_a_row_of_the_data_says_which_line_of_which_file_it_was(files: Files) -> None:
    shown = {**demonstration_row(A, "2"), "source": "chats/one.jsonl", "line": 12}
    files.write(DEMONSTRATIONS, [shown], schema.DemonstrationRow)
    found = rows(files, stage_run("sft", files.of(DEMONSTRATIONS), {}))
    assert [row["source"] for row in found.rows] == ["chats/one.jsonl:12"]
    assert "read from chats/one.jsonl:12" in render_rows(found, found.rows, 1)


def test_each_kind_of_model_has_the_rows_of_its_own_data(files: Files) -> None:
    sft = stage_run("sft", files.of(DEMONSTRATIONS), {})
    assert [row["response"] for row in rows(files, sft).rows] == ["2", "two"]
    reward = stage_run("reward_model", files.of(PREFERENCES), {})
    found = rows(files, reward).rows
    assert [(row["role"], row["response"]) for row in found] == [
        ("chosen", "good"),
        ("rejected", "bad"),
    ]


def test_rows_of_what_does_not_learn_are_refused(files: Files) -> None:
    with pytest.raises(LockstepError, match="is not trained on rows"):
        rows(files, stage_run("report", {}, {}))


def test_a_prompt_and_a_limit_select_rows(files: Files) -> None:
    found = rows(files, update(files))
    shown, total = select(found, content_id(A)[:6], 1)
    assert (len(shown), total) == (1, 2)
    with pytest.raises(LockstepError, match="no row of prompt"):
        select(found, "zzzz", None)


def test_a_file_that_changed_in_the_workspace_is_not_taken_for_the_old_one(files: Files) -> None:
    made = update(files)
    shutil.copy(files.root / SCORES, files.root / "kept")
    (files.root / SCORES).write_bytes(b"something else")
    with pytest.raises(MissingArtifact, match=SCORES) as caught:
        rows(files, made)
    assert "dvc pull" not in str(caught.value)  # nothing here is known to have made it
    digest = files.hashes[SCORES]
    place = files.root / ".dvc" / "cache" / "files" / "md5" / digest[:2]
    place.mkdir(parents=True)
    shutil.copy(files.root / "kept", place / digest[2:])
    assert len(rows(files, made).rows) == 3


def test_outputs_that_wait_in_the_ledger_are_found_there(files: Files) -> None:
    made = update(files)
    found = run_index(lock("workspace", made))
    entry = files.root / ".lockstep" / "jobs" / "policy_update@iter_001" / "x-001"
    (entry / "out").mkdir(parents=True)
    (files.root / EXPERIENCE).rename(entry / "out" / "experience")
    object.__setattr__(made.jobs[0], "folder", entry)
    assert len(rows_of(files.content(found), made).rows) == 3


def test_without_pyarrow_the_answer_says_what_to_install(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LockstepError, match="pip install"):
        rows(files, update(files))


def test_rows_of_two_trainings_are_compared_one_by_one(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other")
    shutil.copytree(files.root / "artifacts", other.root / "artifacts")
    other.hashes |= files.hashes
    other.write(
        EXPERIENCE,
        [
            experience_row(A, 0, "policy_gradient", advantages=[9.0, 9.0]),
            experience_row(A, 1, "policy_gradient"),
            experience_row(B, 0, "policy_gradient"),
        ],
        schema.ExperienceRow,
    )
    changes = compare_rows(rows(files, update(files)), rows(other, update(other)))
    found = {(item.prompt_id, item.sample_index): item for item in changes}
    assert found[content_id(A), 0].fields == ("advantages",)
    assert found[content_id(B), 0].old is None
    assert found[content_id(B), 1].new is None
    assert len(found) == 3


def influence(files: Files, wanted: str) -> Influence:
    found = world(files)
    return trace(files.content(found), found, wanted, None)


def test_a_prompt_is_followed_to_every_model(files: Files) -> None:
    found = influence(files, A)
    assert [(item.stage_run.stage, item.rows) for item in found.direct] == [
        ("sft", 2),
        ("policy_update@iter_001", 2),
    ]
    [child] = found.indirect
    assert child.stage_run.stage == "policy_update@iter_002"
    assert child.through[0] in ("sft", "policy_update@iter_001")
    assert [made.stage for made, _ in found.gone] == ["policy_update@iter_002"]


def test_a_reward_model_passes_its_prompts_on(files: Files) -> None:
    files.write(EXPERIENCE, [experience_row(A, 0, "policy_gradient")], schema.ExperienceRow)
    found = influence(files, f"{content_id(B)[:8]}")
    assert [item.stage_run.stage for item in found.direct] == ["reward_model"]
    ways = {item.stage_run.stage: item.through for item in found.indirect}
    assert ways["policy_update@iter_001"][0] == "reward_model"
    assert [item.stage for item in found.sampled] == ["rollout@iter_001"]


def test_a_held_out_prompt_trains_nothing(files: Files) -> None:
    found = influence(files, C)
    assert (found.direct, found.indirect) == ([], [])
    assert [item.stage for item in found.evaluated] == ["evaluate@iter_001"]


@pytest.mark.parametrize("wanted", ["ffffffff", "no such text", "", "ab"])
def test_an_unknown_prompt_is_an_error_that_shows_some(files: Files, wanted: str) -> None:
    with pytest.raises(LockstepError, match="no such prompt") as caught:
        influence(files, wanted)
    assert content_id(A) in str(caught.value)


def test_hostile_text_is_shown_and_never_run(files: Files) -> None:
    found = rows(files, update(files))
    text = render_rows(found, found.rows, len(found.rows))
    assert repr(HOSTILE) in text
    prompt = influence(files, HOSTILE)
    assert repr(HOSTILE) in render_influence(prompt)
    for page in (rows_page(found, found.rows, 3, [HOSTILE]), prompt_page(prompt, [])):
        assert HOSTILE in Page(page).text
        assert "<script" not in page
