"""What was given to a policy: the folders that some stage on the way has read, and no others."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipelines.export.given_inputs import given_inputs
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.tree import Direction, build_tree
from tests.lineage.world import lock, run_index, stage_run, target

POLICY = "artifacts/policies/iter_001/model"
REWARD = "artifacts/rewards/reward_model"


def prepare(folder: str = "models", **params: Any) -> StageRun:
    return stage_run(
        "prepare",
        {"data": "d", folder: f"hash of {folder}"},
        {"artifacts/base": "b", "artifacts/data/prompts.parquet": "p"},
        params={"prepare.folder": "data", "model.folder": folder, **params},
    )


def sft() -> StageRun:
    return stage_run("sft", {"artifacts/base": "b"}, {"artifacts/policies/sft/model": "s"})


def reward_model(folder: str = "models", **params: Any) -> StageRun:
    return stage_run(
        "reward_model",
        {"artifacts/base": "b", folder: f"hash of {folder}"},
        {REWARD: "r"},
        params={"reward_model.folder": folder, **params},
    )


def update(teacher: str = "models", algorithm: str = "ppo") -> StageRun:
    return stage_run(
        "policy_update@iter_001",
        {"artifacts/policies/sft/model": "s", REWARD: "r", teacher: f"hash of {teacher}"},
        {POLICY: "m"},
        params={"rl.algorithm": algorithm},
    )


def online(teacher: str = "models", algorithm: str = "grpo", **params: Any) -> StageRun:
    folders = {
        "environments": "e",
        "tool_answers": "t",
        "rewards": "f",
        teacher: f"hash of {teacher}",
    }
    return stage_run(
        "online@iter_001",
        {"artifacts/policies/sft/model": "s", "artifacts/data/prompts.parquet": "p", **folders},
        {POLICY: "m"},
        params={"rl.algorithm": algorithm, "score.folder": "rewards", **params},
    )


def given_to(*stage_runs: StageRun) -> Mapping[str, str]:
    """By path, for the policy that the last one made."""
    tree = build_tree(
        run_index(lock("workspace", *stage_runs)), target(stage_runs[-1], POLICY), Direction.UP
    )
    return {item.path: item.hash for item in given_inputs(tree)}


def test_folders_that_are_listed_and_not_read_were_not_given() -> None:
    assert given_to(prepare(), sft(), reward_model(), update()) == {}
    own = {"model.source": "folder", "prepare.source": "files"}
    read = {"data": "d", "mine": "hash of mine"}
    assert given_to(prepare("mine", **own), sft(), reward_model("other"), update("third")) == read


def test_a_teacher_was_given_to_what_is_distilled_alone() -> None:
    folders = {"environments": "e", "tool_answers": "t", "rewards": "f"}
    assert given_to(prepare(), sft(), online()) == folders
    assert given_to(prepare(), sft(), online("elsewhere/teacher")) == folders
    taught = given_to(prepare(), sft(), online("elsewhere/teacher", "distill"))
    assert taught == {**folders, "elsewhere/teacher": "hash of elsewhere/teacher"}


@pytest.mark.parametrize(
    "stage_runs",
    [
        (prepare(), sft(), reward_model(), update(algorithm="distill")),
        (prepare(), sft(), online(algorithm="distill")),
        (prepare(), sft(), reward_model(**{"reward_model.start": "folder"}), update()),
        (prepare(**{"model.source": "folder"}), sft(), reward_model(), update()),
    ],
    ids=["teacher", "teacher online", "reward model", "base model"],
)
def test_the_folder_that_all_have_by_default_was_given_if_one_of_them_has_read_it(
    stage_runs: tuple[StageRun, ...],
) -> None:
    assert given_to(*stage_runs)["models"] == "hash of models"


def test_a_path_is_known_however_it_is_written() -> None:
    params = {"prepare.folder": "./data/", "prepare.source": "arithmetic"}
    assert given_to(prepare(**params), sft(), reward_model(), update()) == {}


def test_an_artifact_whose_making_is_not_known_was_given() -> None:
    assert given_to(update()) == {"artifacts/policies/sft/model": "s", REWARD: "r"}
