"""Every way of learning as a stage: it runs, it says the same things, and splits change nothing."""

import json
import shutil
from functools import cache

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages.algorithms.preference import KtoObjective
from stages.context import StageError
from stages.engines.models.folders import content_hash, load_policy, load_scalar_model
from stages.learning.unpaired import kto, other_completions
from tests.stages.conftest import gone_on

UPDATE = "policy_update@iter_001"
ROLLOUT, SCORE = "rollout@iter_001", "score@iter_001"
EVERY_UPDATE = {
    "grad_norm", "logprob_gap_mean", "logprob_gap_max", "effective_samples", "reward_mean",
    "reward_std", "response_length", "truncation_rate", "num_prompts", "num_responses",
    "num_steps", "loss", "kl_to_reference",
}  # fmt: skip
POLICY_GRADIENT = {
    "policy_loss", "entropy", "kl_to_reference", "approx_kl", "clip_fraction_low",
    "clip_fraction_high", "ratio_min", "ratio_max", "advantage_std", "kl_coef",
    "zero_variance_share",
}  # fmt: skip
PAIRED = {"preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward"}


def by(algorithm, rollout=None, **update):
    """Params of an iteration by the algorithm."""
    return {"rl": {"algorithm": algorithm}, "rollout": rollout or {}, "policy_update": update}


def preferring(loss, **settings):
    """Params of a preference run by the loss."""
    runs = {"preferences": {"tuned": {"policy": "sft"}}}
    return {"rl": runs, "preference": {"loss": loss, "batch_size": 16, **settings}}


IN_LOSS = {"kl_in": "loss", "kl_estimator": "k3"}
PREFERENCE = ["reference_logprobs@tuned", "preference@tuned"]
UPDATES = {
    "ppo": (by("ppo"), POLICY_GRADIENT | {"value_loss", "explained_variance"}),
    "ppo without a value clip": (by("ppo", value_clip=None), {"value_loss"}),
    "ppo with an entropy bonus": (by("ppo", entropy_coef=0.01), POLICY_GRADIENT),
    "grpo": (by("grpo", **IN_LOSS), POLICY_GRADIENT | {"kl_loss"}),
    "grpo with leave-one-out": (by("grpo", leave_one_out=True), POLICY_GRADIENT),
    "dr grpo": (
        by("grpo", normalise_by_std=False, aggregation="sequence_mean_token_sum", kl_coef=0.0),
        POLICY_GRADIENT,
    ),
    "dual clip": (by("grpo", dual_clip=3.0), POLICY_GRADIENT | {"clip_fraction_dual"}),
    "gspo": (by("grpo", objective="gspo", aggregation="sequence_mean_token_mean"), POLICY_GRADIENT),
    "cispo": (by("grpo", objective="cispo", clip_low=1.0), POLICY_GRADIENT),
    "rloo": (by("rloo"), POLICY_GRADIENT),
    "reinforce": (by("reinforce", objective="gradient"), POLICY_GRADIENT),
    "reinforce++": (by("reinforce_pp"), POLICY_GRADIENT),
    "reinforce++ with a baseline": (by("reinforce_pp_baseline"), POLICY_GRADIENT),
    "remax": (by("remax", {"greedy_baseline": True}), POLICY_GRADIENT),
    "cut support": (by("grpo", {"top_p": 0.9, "top_k": 8, "min_p": 0.01}), POLICY_GRADIENT),
    "token truncation": (by("grpo", mismatch="token_truncate"), POLICY_GRADIENT),
    "sequence mask": (by("grpo", mismatch="sequence_mask", mismatch_floor=0.1), POLICY_GRADIENT),
    "iterated dpo": (by("dpo"), PAIRED | {"num_pairs"}),
    "dpo against sft": (by("dpo", dpo_reference="sft"), PAIRED),
    "iterated simpo": (by("dpo", dpo_loss="simpo", dpo_margin=0.2), PAIRED),
    "spin": (
        by("dpo", {"source": "demonstrations", "samples": 1}, chosen="demonstrations"),
        PAIRED,
    ),
    "best of n": (by("best_of_n"), {"kept_share", "kept_reward_mean", "entropy"}),
    "distillation": (by("distill"), {"policy_loss", "kl_to_reference"}),
    "distillation of the likeliest": (by("distill", distill_top_k=5), {"distillation_kl"}),
}
STAGES = {
    **{name: ([ROLLOUT, SCORE, UPDATE], changes) for name, (changes, _) in UPDATES.items()},
    **{
        loss: (PREFERENCE, preferring(loss))
        for loss in ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "simpo", "orpo", "kto")
    },
    "robust": (PREFERENCE, preferring("robust", label_smoothing=0.2)),
    "dpo with nll": (PREFERENCE, preferring("sigmoid", nll_coef=0.5)),
    "sft": (["sft"], {}),
    "bradley-terry": (["reward_model"], {}),
    "regression": (["reward_model"], {"reward_model": {"objective": "regression"}}),
    "process": (["reward_model"], {"reward_model": {"objective": "process"}}),
    "last token": (["reward_model"], {"reward_model": {"compared": "last_token"}}),
}


@pytest.fixture(scope="module")
def whole_run(trained, tmp_path_factory):
    """The run of a name, in steps that are not split, and its last metrics. To be read."""

    @cache
    def run(name):
        return gone_on(trained, tmp_path_factory.mktemp("whole") / "run", *STAGES[name])

    return run


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_learns_and_says_what_every_update_says(whole_run, name):
    _, own = UPDATES[name]
    run, metrics = whole_run(name)
    assert metrics.keys() >= EVERY_UPDATE | own
    assert metrics["logprob_gap_mean"] < 1e-5
    policies = [
        load_policy(run.root / f"artifacts/policies/{policy}/model")
        for policy in ("sft", "iter_001")
    ]
    assert content_hash(policies[0]) != content_hash(policies[1])
    if "ratio_max" in own:
        # Its second step sees a policy that has moved since the rollouts.
        assert metrics["ratio_min"] < 1 < metrics["ratio_max"]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_learns_the_same_however_its_steps_are_split(go_on, whole_run, name):
    _, whole = whole_run(name)
    _, split = go_on("split", *STAGES[name], micro_tokens=100)
    assert split.keys() == whole.keys()
    for key in whole:
        tolerance = {"rel": 2e-3, "abs": 2e-5}
        if key in ("loss", "grad_norm") and name in ("sft", "bradley-terry", "ppo"):
            tolerance = {"rel": 1e-3}
        assert split[key] == pytest.approx(whole[key], **tolerance), key


def test_rejected_responses_are_found_by_each_reward_model(go_on):
    """On arithmetic every objective sees the same slips; none may rank worse than chance."""
    for objective in ("bradley_terry", "regression", "process"):
        run, metrics = go_on(objective, ["reward_model"], {"reward_model": {
            "objective": objective, "epochs": 12, "learning_rate": 5e-3}})  # fmt: skip
        assert metrics["pairwise_accuracy"] > 0.6, objective
        assert (
            load_scalar_model(run.root / "artifacts/rewards/reward_model").score.out_features == 1
        )


def test_the_reward_of_a_process_model_is_a_probability(go_on):
    changes = {"reward_model": {"objective": "process"}, "score": {"missing_eos_penalty": 0.0}}
    run, _ = go_on("run", ["reward_model", SCORE], changes)
    rewards = [row["reward"] for row in run.rows("scores/iter_001")]
    assert all(0 <= reward <= 1 for reward in rewards)
    assert len(set(rewards)) > 1


def test_steps_that_do_not_end_with_the_separator_are_refused(go_on):
    changes = {"reward_model": {"objective": "process", "step_separator": "="}}
    with pytest.raises(StageError, match=r"reward_model\.step_separator stands"):
        go_on("run", ["reward_model"], changes)


def test_rewards_are_the_weighted_sum_of_sources_with_what_each_said(go_on):
    score = {
        "weights": {"reward_model": 0.5, "verifier": 2.0},
        "clip": 1.0,
        "missing_eos_penalty": 0.25,
        "overlong_buffer": 4,
        "overlong_penalty": 0.5,
    }
    run, metrics = go_on("run", [SCORE], {"score": score})
    pairs = zip(run.rows("rollouts/iter_001"), run.rows("scores/iter_001"), strict=True)
    for rollout, row in pairs:
        said = dict(row["by_source"])
        expected = max(-1.0, min(1.0, 0.5 * said["reward_model"] + 2.0 * said["verifier"]))
        expected -= 0.25 * (rollout["finish_reason"] == "length")
        expected -= 0.5 * max(0, len(rollout["response_ids"]) - 8) / 4
        assert row["reward"] == pytest.approx(expected, abs=1e-6)
    assert {"reward_mean/reward_model", "reward_std/verifier"} <= metrics.keys()


def test_whitened_rewards_have_mean_zero_and_spread_one(go_on):
    _, metrics = go_on("run", [SCORE], {"score": {"whiten": True}})
    assert metrics["reward_mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["reward_std"] == pytest.approx(1, abs=1e-6)


def test_the_greedy_response_is_compared_with_and_not_learnt_from(go_on):
    run, metrics = go_on("run", [ROLLOUT, SCORE, UPDATE], by("remax", {"greedy_baseline": True}))
    sampled = run.rows("rollouts/iter_001")
    greedy = [row for row in sampled if row["greedy"]]
    assert [row["sample_index"] for row in greedy] == [3] * 6
    assert metrics["num_responses"] == len(sampled) - len(greedy) == 18


def test_flat_groups_are_dropped_and_others_stand_in_for_them(go_on):
    changes = by("grpo", {"prompts": 3, "reserve": 5})
    run, _ = go_on("run", [ROLLOUT, SCORE], changes)
    sampled = run.rows("rollouts/iter_001")
    assert len({row["prompt_id"] for row in sampled}) == 8
    varied = sorted({row["prompt_id"] for row in sampled})[2:6]
    run.rewrite(
        "scores/iter_001",
        lambda row: {"reward": float(row["prompt_id"] in varied and row["sample_index"] == 0)},
    )
    metrics = run.run(UPDATE)
    assert (metrics["num_prompts"], metrics["num_responses"]) == (3, 3 * 3)
    assert metrics["zero_variance_share"] == 0.5  # of all that were sampled

    run.rewrite("scores/iter_001", lambda _: {"reward": 1.0})
    with pytest.raises(StageError, match="all have the same reward"):
        run.run(UPDATE)


def test_truncated_responses_can_be_left_out(go_on):
    run, whole = go_on("run", [UPDATE], by("grpo", overlong_filter=False))
    assert whole["num_steps"] == 2
    cut = {row["prompt_id"] for row in run.rows("rollouts/iter_001")[:9]}
    for leave_out, steps in ((cut, 1), (None, None)):
        run, _ = go_on(f"filtered {steps}", [], by("grpo", overlong_filter=True))
        run.rewrite("rollouts/iter_001", lambda row, some=leave_out: {
            "finish_reason": "length" if some is None or row["prompt_id"] in some else "stop"
        })  # fmt: skip
        if steps:
            assert run.run(UPDATE)["num_steps"] == steps
        else:
            with pytest.raises(StageError, match="every response was cut"):
                run.run(UPDATE)


def test_an_adaptive_kl_coefficient_goes_on_in_the_next_iteration(go_on):
    changes = by("ppo", kl_target=1e-6, kl_horizon=100, kl_coef=0.3)
    run, metrics = go_on("run", [UPDATE], changes)
    state = json.loads((run.root / "artifacts/policies/iter_001/state/state.json").read_text())
    assert metrics["kl_coef"] == 0.3
    # The first rollouts are the SFT policy's own: at no distance, below any target.
    assert state["kl_coef"] == pytest.approx(0.3 * (1 - 0.2 * 18 / 100))
    assert run.run_iterations("iter_002")["kl_coef"] == state["kl_coef"]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "best_of_n", "dpo", "distill"])
def test_without_a_reference_nothing_is_said_of_a_kl(go_on, algorithm):
    changes = {**by(algorithm, kl_coef=0.0), "score": {"reference": False}}
    run, metrics = go_on("run", [SCORE, UPDATE], changes)
    assert not any("kl_to_reference" in name for name in metrics)
    assert {row["ref_logprobs"] for row in run.rows("scores/iter_001")} == {None}


@pytest.mark.parametrize(
    "change",
    [lambda table: table.slice(1), lambda table: table.take(list(reversed(range(len(table)))))],
    ids=["other rows", "another order"],
)
def test_a_reference_that_belongs_to_other_preferences_is_refused(go_on, change):
    run, _ = go_on("run", PREFERENCE[:1], preferring("sigmoid"))
    path = run.root / "artifacts/reference_logprobs/tuned.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(StageError, match="run reference_logprobs again"):
        run.run("preference@tuned")


def test_the_reference_is_the_policy_that_the_run_starts_from(go_on):
    """Before its first step the policy is its own reference, so DPO's margin starts at zero."""
    run, _ = go_on("run", PREFERENCE, preferring("sigmoid"))
    first, *_ = run.steps("preference@tuned")
    assert first["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_feedback_of_one_kind_is_refused_for_kto(go_on):
    with pytest.raises(StageError, match="KTO needs some of either kind"):
        go_on("run", PREFERENCE, preferring("kto", desirable_above=2.0))


def padded_teacher(trained, folder):
    """The base model with three more rows in its vocabulary, as some families pad theirs."""
    model = load_policy(trained.root / "artifacts/base")
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained.root / "artifacts/base" / name, folder)
    return folder


@pytest.mark.parametrize("top_k", [0, 5, 1000])
def test_a_teacher_may_pad_its_vocabulary(go_on, trained, tmp_path, top_k):
    changes = by("distill", distill_top_k=top_k)
    changes["rl"]["teacher"] = str(padded_teacher(trained, tmp_path / "teacher"))
    go_on("run", [UPDATE], changes)


def test_a_teacher_with_another_tokenizer_is_refused(go_on, trained, tmp_path):
    teacher = padded_teacher(trained, tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    changes = by("distill")
    changes["rl"]["teacher"] = str(teacher)
    with pytest.raises(StageError, match="shares the policy's tokenizer"):
        go_on("run", [UPDATE], changes)
    changes["rl"]["teacher"] = "data"
    with pytest.raises(StageError, match=r"rl\.teacher .* is not a Hugging Face model folder"):
        go_on("none", [UPDATE], changes)


def test_nothing_is_dropped_where_log_probs_are_compared(go_on):
    """Noise in the policy alone would pass for a policy that has moved."""
    changes = {
        **by("grpo", kl_coef=0.0, batch_size=18),
        "lora": {"rank": 2, "alpha": 4.0, "dropout": 0.5, "save": "adapter"},
    }
    addresses = ["sft", ROLLOUT, SCORE, UPDATE]
    _, metrics = go_on("run", addresses, changes)
    assert metrics["num_steps"] == 1
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_a_correction_that_masks_nearly_all_is_refused(go_on):
    changes = by("grpo", mismatch="sequence_mask", mismatch_cap=1.05, max_logprob_gap=1.0)
    run, _ = go_on("run", [], changes)
    run.rewrite(
        "rollouts/iter_001",
        lambda row: {"logprobs": [value - 0.2 for value in row["logprobs"]]},
    )
    with pytest.raises(StageError, match=r"sequence_mask leaves 0\.0% of the tokens"):
        run.run(UPDATE)


def test_a_separator_inside_a_step_is_refused(go_on):
    run, _ = go_on("run", [], {"reward_model": {"objective": "process"}})
    run.rewrite(
        "data/steps",
        lambda row: {"step_ends": row["step_ends"][1:], "step_labels": row["step_labels"][1:]},
    )
    with pytest.raises(StageError, match="use it nowhere else"):
        run.run("reward_model")


def test_a_distilled_policy_is_nearer_to_its_teacher(go_on):
    for name, top_k in (("samples", 0), ("likeliest", 8)):
        changes = by("distill", distill_top_k=top_k, epochs=4, learning_rate=2e-3, kl_coef=0.0)
        run, _ = go_on(name, [UPDATE], changes)
        steps = run.steps(UPDATE)
        if top_k:
            assert steps[-1]["distillation_kl"] < 0.9 * steps[0]["distillation_kl"]
        else:
            assert steps[-1]["kl_to_reference"] > steps[0]["kl_to_reference"]


@pytest.mark.parametrize("save", ["merged", "adapter"])
def test_every_training_stage_learns_through_an_adapter(go_on, save):
    runs = {"preferences": {"tuned": {"policy": "sft"}}}
    changes = {"lora": {"rank": 2, "alpha": 4.0, "save": save}, "rl": runs}
    evaluations = ["evaluate_sft", "evaluate@iter_001"]
    addresses = ["sft", "reward_model", ROLLOUT, SCORE, UPDATE, *PREFERENCE, *evaluations]
    run, _ = go_on("run", addresses, changes)
    for folder in ("policies/sft/model", "policies/iter_001/model", "policies/tuned/model",
                   "rewards/reward_model", "policies/iter_001/state/critic"):  # fmt: skip
        path = run.root / "artifacts" / folder
        assert (path / "adapter_model.safetensors").exists() == (save == "adapter")
        assert (path / "tokenizer.json").exists()
    # A kept adapter goes on with its moments in the next iteration; a merged one starts afresh.
    run.run_iterations("iter_002")
    moments = load_file(run.root / "artifacts/policies/iter_002/state/optimizer.safetensors")
    steps = {float(value) for name, value in moments.items() if name.startswith("policy/step")}
    assert steps == {4.0 if save == "adapter" else 2.0}


def test_an_entropy_bonus_keeps_the_policy_open(go_on):
    ends = {}
    for coef in (0.0, 3.0):
        changes = by("grpo", entropy_coef=coef, epochs=4, learning_rate=3e-3, kl_coef=0.0)
        run, _ = go_on(f"bonus {coef}", [UPDATE], changes)
        ends[coef] = run.steps(UPDATE)[-1]["entropy"]
    assert ends[3.0] > ends[0.0]


def test_a_kl_term_in_the_loss_holds_the_policy_back(go_on):
    """Rewards that say nothing leave the KL term alone with a policy far from its reference."""
    distances = {}
    for coef in (0.0, 5.0):
        changes = by("grpo", {"samples": 3}, kl_in="loss", kl_estimator="k3_unbiased", kl_coef=coef,
                     epochs=4, learning_rate=2e-3)  # fmt: skip
        run, _ = go_on(f"coefficient {coef}", [], changes)
        apart = lambda row: {"ref_logprobs": [x - 0.3 for x in row["ref_logprobs"]]}  # noqa: E731
        run.rewrite("scores/iter_001", apart)
        run.rewrite("scores/iter_001", lambda _: {"reward": 1.0})
        run.run(UPDATE)
        distances[coef] = run.steps(UPDATE)[-1]["kl_to_reference"]
    assert distances[5.0] < 0.8 * distances[0.0]


def test_a_fitted_critic_foresees_more(go_on):
    foreseen = {}
    for epochs in (0, 40):
        changes = by("ppo", critic_warmup_epochs=epochs)
        changes["rl"]["reward"] = "reward_model"
        _, metrics = go_on(f"epochs {epochs}", [UPDATE], changes)
        foreseen[epochs] = metrics["explained_variance"]
    assert foreseen[40] > max(0.5, foreseen[0])


def test_margins_are_what_the_reward_model_is_asked_for(go_on):
    """A head of zeros says 0 for both responses, so the first loss is softplus of the margin."""
    run, _ = go_on("run", [], {"reward_model": {"centre": 0.0}})
    run.rewrite("data/preferences", lambda _: {"margin": 2.0})
    shutil.rmtree(run.root / "artifacts/rewards/reward_model")
    run.run("reward_model")
    assert run.steps("reward_model")[0]["loss"] == pytest.approx(2.126928, abs=1e-5)


def test_iterated_dpo_moves_the_best_away_from_the_worst(go_on):
    run, _ = go_on("run", [UPDATE], by("dpo", epochs=8, learning_rate=3e-3))
    first, *_, last = run.steps(UPDATE)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert last["reward_margin"] > 0.01
    assert last["preference_accuracy"] == 1.0


def test_the_baseline_of_kto_starts_at_no_distance_from_the_reference(go_on):
    """The sum is looked at, because the baseline itself is never below zero."""
    run, _ = go_on("run", PREFERENCE, preferring("kto"))
    feedback, reference = run.rows("data/feedback"), run.rows("reference_logprobs/tuned")
    data = [
        {**row, "desirable": True, "ref": said["completion"], "other_ref": said["other"]}
        for row, said in zip(feedback, reference, strict=True)
    ]
    policy = load_policy(run.root / "artifacts/policies/sft/model")
    work = kto(policy, data, other_completions(feedback), "cpu", KtoObjective(0.1, 1.0, 1.0))
    with torch.no_grad():
        surveyed = work.survey(range(len(data)))
    assert surveyed["log_ratio"] == pytest.approx(0, abs=1e-3)
