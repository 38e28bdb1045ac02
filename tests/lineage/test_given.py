"""What was given to a policy: the folders that some stage on the way has read, and no others."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipelines.export.given import given
from pipelines.lineage.making import Making
from pipelines.lineage.tree import Way, grow
from tests.lineage.world import evidence, lock, making, target

POLICY = "artifacts/policies/iter_001/model"
REWARD = "artifacts/rewards/reward_model"


def prepare(folder: str = "models", **params: Any) -> Making:
    return making(
        "prepare",
        {"data": "d", folder: f"hash of {folder}"},
        {"artifacts/base": "b", "artifacts/data/prompts.parquet": "p"},
        params={"prepare.folder": "data", "model.folder": folder, **params},
    )


def sft() -> Making:
    return making("sft", {"artifacts/base": "b"}, {"artifacts/policies/sft/model": "s"})


def reward_model(folder: str = "models", **params: Any) -> Making:
    return making(
        "reward_model",
        {"artifacts/base": "b", folder: f"hash of {folder}"},
        {REWARD: "r"},
        params={"reward_model.folder": folder, **params},
    )


def update(teacher: str = "models", algorithm: str = "ppo") -> Making:
    return making(
        "policy_update@iter_001",
        {"artifacts/policies/sft/model": "s", REWARD: "r", teacher: f"hash of {teacher}"},
        {POLICY: "m"},
        params={"rl.algorithm": algorithm},
    )


def online(teacher: str = "models", algorithm: str = "grpo", **params: Any) -> Making:
    folders = {"environments": "e", "rewards": "f", teacher: f"hash of {teacher}"}
    return making(
        "online@iter_001",
        {"artifacts/policies/sft/model": "s", "artifacts/data/prompts.parquet": "p", **folders},
        {POLICY: "m"},
        params={"rl.algorithm": algorithm, "score.folder": "rewards", **params},
    )


def given_to(*makings: Making) -> Mapping[str, str]:
    """By path, for the policy that the last one made."""
    tree = grow(evidence(lock("workspace", *makings)), target(makings[-1], POLICY), Way.UP)
    return {item.path: item.hash for item in given(tree)}


def test_folders_that_are_listed_and_not_read_were_not_given() -> None:
    assert given_to(prepare(), sft(), reward_model(), update()) == {}
    own = {"model.source": "folder", "prepare.source": "files"}
    read = {"data": "d", "mine": "hash of mine"}
    assert given_to(prepare("mine", **own), sft(), reward_model("other"), update("third")) == read


def test_a_teacher_was_given_to_what_is_distilled_alone() -> None:
    folders = {"environments": "e", "rewards": "f"}
    assert given_to(prepare(), sft(), online()) == folders
    assert given_to(prepare(), sft(), online("elsewhere/teacher")) == folders
    taught = given_to(prepare(), sft(), online("elsewhere/teacher", "distill"))
    assert taught == {**folders, "elsewhere/teacher": "hash of elsewhere/teacher"}


@pytest.mark.parametrize(
    "makings",
    [
        (prepare(), sft(), reward_model(), update(algorithm="distill")),
        (prepare(), sft(), online(algorithm="distill")),
        (prepare(), sft(), reward_model(**{"reward_model.start": "folder"}), update()),
        (prepare(**{"model.source": "folder"}), sft(), reward_model(), update()),
    ],
    ids=["teacher", "teacher online", "reward model", "base model"],
)
def test_the_folder_that_all_have_by_default_was_given_if_one_of_them_has_read_it(
    makings: tuple[Making, ...],
) -> None:
    assert given_to(*makings)["models"] == "hash of models"


def test_a_path_is_known_however_it_is_written() -> None:
    params = {"prepare.folder": "./data/", "prepare.source": "arithmetic"}
    assert given_to(prepare(**params), sft(), reward_model(), update()) == {}


def test_an_artifact_whose_making_is_not_known_was_given() -> None:
    assert given_to(update()) == {"artifacts/policies/sft/model": "s", REWARD: "r"}
