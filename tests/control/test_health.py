"""Training that goes wrong without failing is warned of, and training that goes well is not."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.contracts.params import Params
from stages.contracts.warn import WarnParams
from stages.health import ADVICE, Reading, Symptom, WarningKind, judge, judge_family

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = WarnParams()
OFF = {
    WarningKind.ENTROPY_COLLAPSE: {"entropy_share": None},
    WarningKind.KL_BLOW_UP: {"kl": None, "kl_growth": None},
    WarningKind.REWARD_STANDING_STILL: {"reward_iterations": None},
    WarningKind.LENGTH_DRIFT: {"length_ratio": None},
    WarningKind.TRUNCATION: {"truncation": None},
    WarningKind.FLAT_GROUPS: {"flat_groups": None},
    WarningKind.REWARD_NEAR_CHANCE: {"reward_accuracy": None},
    WarningKind.NOTHING_RIGHT: {"sft_accuracy": None},
    WarningKind.WRONG_REWARDED_MOST: {"wrong_lead": None},
}


def line(*readings: dict[str, float]) -> list[Reading]:
    """Policies one after the other, the SFT policy first."""
    names = ["sft", *(f"iter_{number:03}" for number in range(1, len(readings)))]
    return [Reading(name, metrics) for name, metrics in zip(names, readings, strict=True)]


def series(metric: str, *values: float, **others: float) -> list[Reading]:
    return line(*({metric: value, **others} for value in values))


def kinds(symptoms: tuple[Symptom, ...] | list[Symptom]) -> list[WarningKind]:
    return [symptom.kind for symptom in symptoms]


def ending(metric: str, *values: float, **others: float) -> tuple[list[Reading], list[Reading]]:
    """Two series that differ in their last value: one that is fine, one to be warned of."""
    *begin, quiet, loud = values
    return series(metric, *begin, quiet, **others), series(metric, *begin, loud, **others)


QUIET_AND_LOUD = [
    (WarningKind.ENTROPY_COLLAPSE, *ending("entropy", 1.0, 0.6, 0.2, 0.199)),
    (WarningKind.KL_BLOW_UP, *ending("kl_to_reference", 0.0, 0.3, 0.5, 0.501)),
    (WarningKind.KL_BLOW_UP, *ending("kl_to_reference", 0.0, 0.04, 0.12, 0.121)),  # by growth
    (
        WarningKind.REWARD_STANDING_STILL,
        *ending("reward_mean", 0.1, 0.5, 0.51, 0.40, 0.526, 0.524, reward_std=0.5),
    ),
    (WarningKind.LENGTH_DRIFT, *ending("response_length", 20.0, 30.0, 40.0, 40.1)),
    (WarningKind.LENGTH_DRIFT, *ending("response_length", 20.0, 15.0, 10.0, 9.9)),
    (WarningKind.TRUNCATION, *ending("truncation_rate", 0.0, 0.3, 0.301)),
    (WarningKind.FLAT_GROUPS, *ending("zero_variance_share", 0.0, 0.9, 0.901)),
    (WarningKind.REWARD_NEAR_CHANCE, *ending("pairwise_accuracy", 0.6, 0.52)),
    (WarningKind.NOTHING_RIGHT, *ending("accuracy_sampled", 0.01, 0.0)),
    (WarningKind.WRONG_REWARDED_MOST, *ending("wrong_lead", 0.0, 0.0, 0.25)),
]


@pytest.mark.parametrize(("kind", "quiet", "loud"), QUIET_AND_LOUD)
def test_each_warning_begins_at_its_threshold_and_can_be_switched_off(
    kind: WarningKind, quiet: list[Reading], loud: list[Reading]
) -> None:
    assert judge(quiet, DEFAULT) == ()
    [symptom] = judge(loud, DEFAULT)
    assert symptom.kind is kind
    assert symptom.policy == loud[-1].policy
    assert symptom.advice == ADVICE[kind]
    assert loud[-1].policy in symptom.sentence
    off = DEFAULT.model_copy(update=OFF[kind])
    assert judge(loud, off) == ()


@pytest.mark.parametrize("loud", [loud for _, _, loud in QUIET_AND_LOUD])
def test_what_was_compared_with_what_is_named(loud: list[Reading]) -> None:
    """A value that is at the threshold a symptom names would not have been warned of."""
    [symptom] = judge(loud, DEFAULT)
    assert symptom.value == loud[-1].metrics[symptom.metric]
    at = Reading(symptom.policy, {**loud[-1].metrics, symptom.metric: symptom.threshold})
    slack = DEFAULT.model_copy(update={"reward_gain": 0.0499})
    assert judge([*loud[:-1], at], slack) == ()


def test_every_kind_is_tried_above() -> None:
    assert {kind for kind, _, _ in QUIET_AND_LOUD} == set(WarningKind) == set(ADVICE)


@pytest.mark.parametrize("name", ["ppo_reward_model", "grpo_verifier"])
def test_the_recorded_demos_are_quiet(name: str) -> None:
    for run in json.loads((ROOT / "benchmarks/results/demo.json").read_text())["runs"]:
        readings = {policy: Reading(policy, m) for policy, m in run[name]["policies"].items()}
        assert readings.keys() == {"sft", *Params().rl.family}
        assert judge_family(Params().rl.family, readings, DEFAULT) == []


def test_the_first_step_away_from_sft_is_no_growth_of_kl() -> None:
    assert judge(series("kl_to_reference", 3e-10, 0.2), DEFAULT) == ()
    assert kinds(judge(series("kl_to_reference", 3e-10, 0.01, 0.2), DEFAULT)) == [
        WarningKind.KL_BLOW_UP
    ]


def test_small_kl_may_grow_by_any_factor() -> None:
    assert judge(series("kl_to_reference", 0.0, 1e-5, 0.1), DEFAULT) == ()


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        (WarningKind.ENTROPY_COLLAPSE, series("entropy", 1.0, 0.5, 0.01)),
        (
            WarningKind.REWARD_STANDING_STILL,
            series("reward_mean", 1.0, 1.0, 1.0, 1.0, reward_std=0.0),
        ),
        (WarningKind.FLAT_GROUPS, line({}, {"zero_variance_share": 1.0})),
    ],
)
def test_a_policy_that_has_become_right_is_decided_and_that_is_no_trouble(
    kind: WarningKind, trouble: list[Reading]
) -> None:
    def accurate(value: float) -> list[Reading]:
        last = trouble[-1]
        return [*trouble[:-1], Reading(last.policy, {**last.metrics, "accuracy_sampled": value})]

    assert judge(accurate(0.95), DEFAULT) == ()
    assert kinds(judge(accurate(0.94), DEFAULT)) == [kind]
    assert kinds(judge(accurate(1.0), DEFAULT.model_copy(update={"solved": None}))) == [kind]


def test_a_policy_in_the_making_is_as_right_as_the_nearest_that_was_measured() -> None:
    made = line({"entropy": 1.0, "accuracy_sampled": 0.97}, {"entropy": 0.01})
    assert judge(made, DEFAULT) == ()
    worse = line(
        {"entropy": 1.0, "accuracy_sampled": 0.97}, {"accuracy_sampled": 0.2}, {"entropy": 0.01}
    )
    assert kinds(judge(worse, DEFAULT)) == [WarningKind.ENTROPY_COLLAPSE]


def test_a_reward_that_has_no_history_does_not_stand_still() -> None:
    assert judge(series("reward_mean", 0.5, 0.5, 0.5, reward_std=0.1), DEFAULT) == ()


def test_a_falling_reward_does_not_rise() -> None:
    falling = series("reward_mean", 0.5, 0.4, 0.3, 0.2, reward_std=0.1)
    assert kinds(judge(falling, DEFAULT)) == [WarningKind.REWARD_STANDING_STILL]


def test_branches_are_judged_by_their_own_ancestors() -> None:
    """`odd` comes after `iter_002` in params.yaml, and starts from iter_001."""
    parents = {"iter_001": "sft", "iter_002": "iter_001", "odd": "iter_001", "last": "odd"}
    values = {"sft": 0.0, "iter_001": 0.1, "iter_002": 0.01, "odd": 0.25, "last": 0.3}
    readings = {name: Reading(name, {"kl_to_reference": kl}) for name, kl in values.items()}
    assert judge_family(parents, readings, DEFAULT) == []
    in_order = dict(zip(list(values)[1:], values, strict=False))
    assert [f.policy for f in judge_family(in_order, readings, DEFAULT)] == ["odd"]


def test_what_was_not_measured_is_not_judged() -> None:
    assert judge(line({}, {}), DEFAULT) == ()
    parents = {"iter_001": "sft", "iter_002": "iter_001"}
    readings = {"iter_002": Reading("iter_002", {"entropy": 0.0, "kl_to_reference": 0.7})}
    assert kinds(judge_family(parents, readings, DEFAULT)) == [WarningKind.KL_BLOW_UP]


def test_a_missing_ancestor_is_passed_over() -> None:
    gap = line({}, {"entropy": 1.0}, {}, {"entropy": 0.1})
    [symptom] = judge(gap, DEFAULT)
    assert "iter_001's 1" in symptom.sentence


METRICS = (
    "entropy",
    "kl_to_reference",
    "reward_mean",
    "reward_std",
    "response_length",
    "truncation_rate",
    "zero_variance_share",
    "accuracy_sampled",
)
readings = st.dictionaries(st.sampled_from(METRICS), st.floats(), max_size=len(METRICS))


@given(st.lists(readings, min_size=1, max_size=6))
def test_any_numbers_can_be_judged_and_none_that_is_not_finite_is(
    policies: list[dict[str, float]],
) -> None:
    for symptom in judge(line(*policies), DEFAULT):
        assert math.isfinite(symptom.value)


@given(
    st.lists(st.floats(-10, 10), min_size=4, max_size=8),
    st.sampled_from([0.25, 0.5, 2.0, 4.0]),
)
def test_the_unit_of_the_reward_does_not_matter(rewards: list[float], unit: float) -> None:
    """Scaled with its spread, a reward stands as still as before; the units are exact in floats."""
    plain = judge(series("reward_mean", *rewards, reward_std=1.0), DEFAULT)
    scaled = judge(series("reward_mean", *(unit * r for r in rewards), reward_std=unit), DEFAULT)
    assert kinds(plain) == kinds(scaled)


def test_thresholds_are_checked_like_any_param() -> None:
    assert Params.model_validate({"warn": {"kl": None}}).warn.kl is None
    with pytest.raises(ValueError, match="entropy_share"):
        Params.model_validate({"warn": {"entropy_share": 1.5}})
