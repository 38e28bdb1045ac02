"""The pipeline as it ships, at its full size, with PPO and then with a step of GRPO: it learns, and
run again elsewhere it makes the same bytes.

Elsewhere is a second clone, in surroundings as different as can be: another folder with a space in
its name, another hash seed, locale, encoding, time zone and umask, and all stages in one session,
nothing of it forked from processes that are ready, instead of a forked process each. It runs at the
same time, up to the first policy that PPO makes and its evaluation: what comes after is made as
that was.
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
HERE = {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "TZ": "Pacific/Kiritimati"}
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
    """Two clones with the shipped params, in different surroundings."""
    here = copy_tree(tmp_path / "clone")
    here.variables |= HERE
    here.without_tracking()
    elsewhere = copy_tree(tmp_path / "a longer way" / "down" / "twin")
    elsewhere.variables |= ELSEWHERE
    elsewhere.without_tracking()
    yield [here, elsewhere]
    for clone in (here, elsewhere):
        clone.kill_all()


def run_both(twins: list[Clone]) -> None:
    """The first policy in both clones at the same time, in the second in a session."""
    here, elsewhere = twins
    first = "lockstep run evaluate_sft evaluate@iter_001"
    in_a_session = (
        f"umask 077; lockstep session up --stages {OF_A_PIPELINE}"
        f" && {first} && lockstep session down"
    )
    running = [here.start(*first.split()), elsewhere.start("sh", "-c", in_a_session)]
    for command in running:
        output, _ = command.communicate()
        assert command.returncode == 0, output


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


def assert_same_bytes(twins: list[Clone]) -> None:
    """Of all files that were made, and of what DVC recorded about their stages."""
    here, elsewhere = map(contents, twins)
    assert len(elsewhere) > 30
    assert here == elsewhere
    stages, stages_elsewhere = (read_stages(clone.root) for clone in twins)
    assert len(stages_elsewhere) == 9
    assert stages == stages_elsewhere


def test_ppo_and_grpo_learn_and_ppo_makes_the_same_bytes_elsewhere(twins: list[Clone]) -> None:
    run_both(twins)
    assert_same_bytes(twins)
    clone = twins[0]
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
