"""Why two artifacts differ: root causes, whatever lies between them and what is compared."""

import pytest

from pipelines.lineage.compare import CauseKind, Comparison, compare
from pipelines.lineage.stage_run import StageRun
from tests.lineage.world import HERE, chain, digest, lock, run_index, stage_run, target

EVALUATION = "artifacts/evaluations/sft"


def compared(old: tuple[StageRun, ...], new: tuple[StageRun, ...]) -> Comparison:
    """The last of both, each in a lock of its own."""
    here, there = lock("workspace", *new), lock("abc", *old)
    found = run_index(here, there)
    return compare(found, target(old[-1], EVALUATION, there), target(new[-1], EVALUATION, here))


def causes(outcome: Comparison) -> list[tuple[str, str]]:
    return [(root.kind.value, root.change.key) for root in outcome.roots]


def test_a_param_is_the_root_cause_of_all_that_follows() -> None:
    outcome = compared(chain(learning_rate=0.1), chain(learning_rate=0.2))
    assert not outcome.equal
    [root] = outcome.roots
    assert (root.kind, root.change.old, root.change.new) == (CauseKind.PARAM, 0.1, 0.2)
    assert root.stages == ("sft",)
    assert [pair.title for pair in outcome.pairs] == ["sft", "evaluate_sft"]


def test_given_data_are_a_root_cause_where_they_come_in() -> None:
    outcome = compared(chain(data="one"), chain(data="two"))
    assert causes(outcome) == [("data", "data")]
    assert [pair.title for pair in outcome.pairs] == ["prepare", "sft", "evaluate_sft"]


BROKEN = [("broken promise", "sft")]
XEON = ({**HERE, "cpu": "Xeon"},)
CASES = {
    "code is named by its files": (
        chain(code={"stages/a.py": "1", "stages/b.py": "1", "stages/gone.py": "1"}),
        chain(code={"stages/a.py": "1", "stages/b.py": "2", "stages/new.py": "1"}, mark="!"),
        [("code", "stages/b.py"), ("code", "stages/gone.py"), ("code", "stages/new.py")],
    ),
    "packages are compared one by one": (
        chain(),
        chain(environment={**HERE, "packages": {"torch": "2.12.0"}}, mark="!"),
        [("environment", "packages.torch")],
    ),
    "jobs that moved between the same machines may have done so at other steps": (
        chain(earlier=XEON),
        chain(earlier=XEON, mark="!"),
        [("environment", "cpu")],
    ),
    "another host alone explains nothing": (
        chain(),
        chain(environment={**HERE, "host": "b"}, mark="!"),
        BROKEN,
    ),
    "equal in everything but the bytes is a broken promise": (chain(), chain(mark="!"), BROKEN),
    "without records of the job nobody is accused": (
        chain(environment=None),
        chain(environment=None, mark="!"),
        [("unknown", "sft")],
    ),
    "of two causes the first stage's comes first": (
        chain(data="one", learning_rate=0.1),
        chain(data="two", learning_rate=0.2),
        [("data", "data"), ("param", "sft.learning_rate")],
    ),
}


@pytest.mark.parametrize(("old", "new", "expected"), CASES.values(), ids=CASES)
def test_what_differs_first_is_the_cause(
    old: tuple[StageRun, ...], new: tuple[StageRun, ...], expected: list[tuple[str, str]]
) -> None:
    outcome = compared(old, new)
    assert causes(outcome) == expected
    assert outcome.broken == (expected is BROKEN)


def test_the_environment_is_the_cause_only_where_nothing_else_is() -> None:
    other = {**HERE, "threads": "8", "host": "b"}
    alone = compared(chain(), chain(environment=other, mark="!"))
    assert causes(alone) == [("environment", "threads")]
    pair = alone.pairs[0]
    assert [change.key for change in pair.information] == ["host"]

    with_param = compared(chain(), chain(environment=other, learning_rate=0.2))
    assert causes(with_param) == [("param", "sft.learning_rate")]
    assert [change.key for change in with_param.pairs[0].environment] == ["threads"]


def test_a_machine_that_a_job_was_preempted_on_is_a_cause_too() -> None:
    moved = chain(earlier=XEON, mark="!")
    for old, new in ((chain(), moved), (moved, chain())):
        assert causes(compared(old, new)) == [("environment", "cpu")]
    [root] = compared(chain(), moved).roots
    assert (root.change.old, root.change.new) == ("Neoverse", "Xeon, then Neoverse")


def test_equal_artifacts_are_equal_even_if_the_code_is_not() -> None:
    outcome = compared(chain(), chain(code={"stages/x.py": "2"}))
    assert outcome.equal
    same = chain()
    assert compared(same, same).roots == ()


def test_a_param_that_a_lock_does_not_name_has_its_default() -> None:
    old, new = (
        stage_run("sft", {}, {"artifacts/policies/sft/model": mark}, params=params)
        for mark, params in (("1", {"sft.epochs": 4}), ("2", {}))
    )
    found = run_index(lock("workspace", new), lock("abc", old))
    outcome = compare(found, target(old), target(new))
    assert not [root for root in outcome.roots if root.kind is CauseKind.PARAM]


def test_policies_of_two_iterations_differ_in_what_they_are() -> None:
    rollouts = [
        stage_run(
            f"rollout@{key}",
            {f"artifacts/policies/{policy}/model": policy},
            {f"artifacts/rollouts/{key}.parquet": key},
        )
        for key, policy in (("iter_001", "sft"), ("iter_002", "iter_001"))
    ]
    makers = [
        stage_run("sft", {}, {"artifacts/policies/sft/model": "sft"}),
        stage_run("policy_update@iter_001", {}, {"artifacts/policies/iter_001/model": "iter_001"}),
    ]
    found = run_index(lock("workspace", *rollouts, *makers))
    outcome = compare(found, *(target(item) for item in rollouts))
    assert causes(outcome) == [("stage", "stage"), ("key", "key")]


def test_another_reward_is_the_cause_and_the_input_that_it_chooses_is_not() -> None:
    def policy(algorithm: str, reward: str, mark: str) -> tuple[StageRun, ...]:
        rewards = f"artifacts/rewards/{reward}"
        critic = {rewards: digest(reward)} if algorithm == "ppo" else {}
        scores = {"artifacts/scores/iter_001.parquet": digest(f"scores{mark}")}
        rollouts = {"artifacts/rollouts/iter_001.parquet": digest(f"rollouts{mark}")}
        samples = 4 if algorithm == "ppo" else 8
        source = "reward_model" if reward == "reward_model" else "prepare"
        return (
            stage_run(source, {}, {rewards: digest(reward)}),
            stage_run("rollout@iter_001", {}, rollouts, params={"rollout.samples": samples}),
            stage_run(
                "score@iter_001",
                {**rollouts, rewards: digest(reward)},
                scores,
                params={"rl.reward": reward},
            ),
            stage_run(
                "policy_update@iter_001",
                {**critic, **rollouts, **scores},
                {"artifacts/policies/iter_001/model": digest(f"model{mark}")},
                params={"rl.reward": reward, "rl.algorithm": algorithm},
            ),
        )

    ppo, grpo = policy("ppo", "reward_model", "A"), policy("grpo", "verifier", "B")
    here, there = lock("workspace", *ppo), lock("there", *grpo)
    outcome = compare(
        run_index(here, there), target(ppo[-1], inside=here), target(grpo[-1], inside=there)
    )
    assert causes(outcome) == [
        ("param", "rl.reward"),
        ("param", "rl.algorithm"),
        ("param", "rollout.samples"),
    ]
    score = next(pair for pair in outcome.pairs if pair.title == "score@iter_001")
    assert {change.role for change in score.inputs if not change.chosen} == {"rollouts"}
