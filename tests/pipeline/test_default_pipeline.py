"""The pipeline as it ships, at its full size, with PPO and then with a step of GRPO: it learns. And
with the model as it ships, on less data, it makes the same bytes when it is run again elsewhere.

Elsewhere is a second clone, in surroundings as different as can be: another folder with a space in
its name, another hash seed, locale, encoding, time zone and umask, and all stages in one session,
nothing of it forked from processes that are ready, instead of a forked process each. It runs at the
same time.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.dvc_repo.lock_file import read_stages
from tests.conftest import OF_A_PIPELINE, Clone, copy_tree
from tests.pipeline.conftest import contents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CRITIC_NAMES = {"value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm"}
LESS = {
    "prepare__demonstrations": 320,
    "prepare__preferences": 320,
    "prepare__prompts": 200,
    "prepare__held_out": 64,
    "sft__epochs": 2,
    "rollout__prompts": 80,
    "policy_update__epochs": 1,
    "rl__iterations": {"iter_001": {"policy": "sft"}},
}
"""Still several micro-batches, and responses and scores of more than one batch, in every stage."""
ELSEWHERE = {
    "PYTHONHASHSEED": "4242",
    "LC_ALL": "POSIX",
    # Without these Python would take UTF-8 whatever the locale says.
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONUTF8": "0",
    "TZ": "America/St_Johns",
    "LOCKSTEP_WARM": "off",
}


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[list[Clone]]:
    """Two clones with less data, in surroundings of their own."""
    clones = [copy_tree(tmp_path / "clone"), copy_tree(tmp_path / "a longer way/down/twin")]
    clones[1].variables |= ELSEWHERE
    for clone in clones:
        clone.without_tracking()
        clone.set_params(**LESS)
        clone.commit("less")
    yield clones
    for clone in clones:
        clone.kill_all()


def run_both(twins: list[Clone]) -> None:
    """The whole pipeline in both clones at the same time, in the second in a session."""
    here, elsewhere = twins
    in_a_session = (
        f"umask 077; lockstep session up --stages {OF_A_PIPELINE}"
        " && lockstep run && lockstep session down"
    )
    second = elsewhere.start("sh", "-c", in_a_session)
    here.run("lockstep", "run")
    output, _ = second.communicate()
    assert second.returncode == 0, output


def evaluations(clone: Clone) -> dict[str, dict[str, float]]:
    folder = clone.root / "metrics/evaluations"
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def assert_learnt(clone: Clone, policy: str) -> None:
    policies = evaluations(clone)
    before, after = policies["sft"], policies[policy]
    assert after["accuracy"] >= before["accuracy"] + 0.15
    assert after["accuracy_sampled"] > before["accuracy_sampled"]
    assert before["kl_to_reference"] == pytest.approx(0, abs=1e-6)
    assert 0 < after["kl_to_reference"] < 1
    assert after["entropy"] > 0.25 * before["entropy"]
    assert after["truncation_rate"] < 0.05


def test_in_other_surroundings_it_makes_the_same_bytes(twins: list[Clone]) -> None:
    """All files that are made, and what DVC records about their stages."""
    run_both(twins)
    here, elsewhere = map(contents, twins)
    assert len(elsewhere) > 30
    assert here == elsewhere
    stages, stages_elsewhere = (read_stages(clone.root) for clone in twins)
    assert len(stages_elsewhere) == 10
    assert stages == stages_elsewhere


def test_ppo_and_grpo_learn(clone: Clone) -> None:
    clone.without_tracking()
    clone.run("lockstep", "run")
    reward_model = json.loads((clone.root / "metrics/reward_model.json").read_text())
    assert reward_model["pairwise_accuracy"] >= 0.85
    assert_learnt(clone, "iter_003")
    update = clone.root / "metrics/iterations/iter_001/policy_update.json"
    ppo_names = set(json.loads(update.read_text()))
    supervised = evaluations(clone)["sft"]["accuracy"]

    clone.run("lockstep", "preset", "grpo")
    clone.set_params(rl__reward="verifier", rl__iterations={"iter_001": {"policy": "sft"}})
    clone.run("lockstep", "run")
    assert evaluations(clone)["sft"]["accuracy"] == supervised
    assert_learnt(clone, "iter_001")
    assert set(json.loads(update.read_text())) == (ppo_names - CRITIC_NAMES) | {"kl_loss"}
    state = clone.root / "artifacts/policies/iter_001/state"
    assert not (state / "critic").exists()
