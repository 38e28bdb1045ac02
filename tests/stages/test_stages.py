"""Each stage on tiny inputs: what it leaves, what it refuses, and that it does so to the byte."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from stages.context import StageError, Stopped
from stages.data.batching import collate
from stages.data.seeds import stable_hash
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.scalars import sequence_rewards
from stages.engines.models.folders import content_hash, load_policy, load_scalar_model
from tests.stages.conftest import rewrite_weights
from tests.stages.test_algorithms import EVERY_UPDATE, POLICY_GRADIENT

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS, SCORES = "rollouts/iter_001", "scores/iter_001"
UPDATE = "policy_update@iter_001"


def rewrite(runner, name, change):
    path = runner.root / f"artifacts/{name}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def test_sft_learns_and_leaves_a_model_with_its_tokenizer(trained):
    first, *_, last = trained.steps("sft")
    assert last["loss"] < first["loss"]
    folder = trained.root / "artifacts/policies/sft"
    names = {path.name for path in (folder / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert json.loads((folder / "state/state.json").read_text()) == {"steps": 0, "kl_coef": None}


def test_without_epochs_the_policy_is_the_base_model_as_it_is(copied):
    runner = copied(sft={"epochs": 0})
    shutil.rmtree(runner.root / "artifacts/policies/sft")
    (runner.root / "artifacts/data/demonstrations.parquet").unlink()
    assert runner.run("sft") == {"num_steps": 0, "num_tokens": 0}
    folder = runner.root / "artifacts/policies/sft"
    assert runner.contents(folder / "model") == runner.contents(runner.root / "artifacts/base")
    assert json.loads((folder / "state/state.json").read_text()) == {"steps": 0, "kl_coef": None}
    assert runner.run("rollout@iter_001")["num_sequences"] == 18


def test_the_loss_of_sft_is_that_of_a_model_whose_prompt_labels_are_masked(copied):
    runner = copied()
    rows = runner.rows("data/demonstrations")
    model = load_policy(runner.root / "artifacts/base")
    row = rows[0]
    batch = collate([row["prompt_ids"]], [row["completion_ids"]], pad_id=0)
    with torch.no_grad():
        ours = -response_logprobs(model, batch, 1.0).logprobs.sum()
        labels = batch.ids.clone()
        labels[:, : len(row["prompt_ids"])] = -100
        theirs = model(batch.ids, labels=labels).loss * len(row["completion_ids"])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_weights_are_readable_by_others(trained):
    for folder in ("base", "policies/sft/model", "rewards/reward_model"):
        for path in (trained.root / "artifacts" / folder).iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o644, path


def test_the_reward_model_is_an_ordinary_sequence_classifier(trained):
    folder = trained.root / "artifacts/rewards/reward_model"
    pair = trained.rows("data/held_out_preferences")[0]
    model = load_scalar_model(folder)
    batch = collate([pair["prompt_ids"]] * 2, [pair["chosen_ids"], pair["rejected_ids"]], pad_id=0)
    with torch.no_grad():
        plain = model(batch.ids, attention_mask=batch.attention_mask).logits.squeeze(-1)
        torch.testing.assert_close(sequence_rewards(model, batch), plain)
    quality = json.loads((folder / "quality.json").read_text())
    assert quality["pairwise_accuracy"] == trained.metrics["reward_model"]["pairwise_accuracy"]


def test_rewards_of_training_responses_have_a_deviation_of_one(trained):
    """A KL coefficient then means the same for every reward model."""
    pairs = trained.rows("data/preferences")
    prompts = [pair["prompt_ids"] for pair in pairs]
    responses = [pair[side] for side in ("chosen_ids", "rejected_ids") for pair in pairs]
    model = load_scalar_model(trained.root / "artifacts/rewards/reward_model")
    with torch.no_grad():
        rewards = sequence_rewards(model, collate(prompts * 2, responses, pad_id=0))
    assert float(rewards.std(correction=0)) == pytest.approx(1, rel=1e-4)


def test_rollouts_are_sorted_seeded_by_content_and_named_by_their_policy(trained):
    rows = trained.rows(ROLLOUTS)
    keys = [(row["prompt_id"], row["sample_index"]) for row in rows]
    assert keys == sorted(keys)
    assert len(rows) == 6 * 3
    policy = load_policy(trained.root / "artifacts/policies/sft/model")
    assert {row["policy_hash"] for row in rows} == {content_hash(policy)}
    for row in rows:
        expected = stable_hash(17, "iter_001", row["prompt_id"], row["sample_index"])
        assert row["seed"] == expected
        assert len(row["logprobs"]) == len(row["response_ids"])


def test_iterations_draw_different_prompts(copied):
    runner = copied(rl={"iterations": {"iter_001": {"policy": "sft"}, "other": {"policy": "sft"}}})
    runner.run("rollout@other")
    drawn = [
        {row["prompt_id"] for row in runner.rows(f"rollouts/{name}")}
        for name in ("iter_001", "other")
    ]
    assert drawn[0] != drawn[1]


def test_a_stopped_rollout_goes_on_and_ends_with_the_same_bytes(copied, trained):
    runner = copied()
    path = runner.paths("rollout@iter_001")[1]["rollouts"]
    path.unlink()
    ctx = runner.context("rollout@iter_001")
    progress = ctx.progress
    ctx.progress = lambda *a, **k: (progress(*a, **k), ctx.request_stop())
    with pytest.raises(Stopped):
        runner.run("rollout@iter_001", ctx)
    assert not path.exists()
    runner.run("rollout@iter_001")
    assert runner.contents(path) == runner.contents(trained.root / path.relative_to(runner.root))


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(copied):
    runner = copied(rollout={"max_new_tokens": 46})
    with pytest.raises(StageError, match=r"rollout\.max_new_tokens 46 do not fit .* 48"):
        runner.run("rollout@iter_001")


def test_scores_stand_row_by_row_beside_the_rollouts(trained):
    rollouts, scores = trained.rows(ROLLOUTS), trained.rows(SCORES)
    for rollout, score in zip(rollouts, scores, strict=True):
        assert rollout["prompt_id"] == score["prompt_id"]
        # The reference is the policy that sampled, in the first iteration.
        assert score["ref_logprobs"] == pytest.approx(rollout["logprobs"], abs=1e-5)


def test_a_response_that_did_not_end_pays_for_it(copied):
    runner = copied(rl={"reward": "verifier"}, score={"missing_eos_penalty": 0.5})
    right = {"response": "1;85", "answer": "85"}
    rewrite(
        runner,
        ROLLOUTS,
        lambda rows: [
            rows[0].update(right, finish_reason="stop"),
            rows[1].update(right, finish_reason="length"),
            rows[2].update(right, response="1;84", finish_reason="stop"),
        ],
    )
    runner.run("score@iter_001")
    assert [row["reward"] for row in runner.rows(SCORES)[:3]] == [1.0, -0.5, 0.0]


def test_a_verifier_without_an_answer_to_compare_with_says_so(copied):
    runner = copied(rl={"reward": "verifier"})
    rewrite(runner, ROLLOUTS, lambda rows: rows[0].update(answer=None))
    with pytest.raises(StageError, match="has no 'answer'"):
        runner.run("score@iter_001")


@pytest.mark.parametrize(
    ("algorithm", "reward", "own"),
    [
        ("ppo", "reward_model", {"value_loss", "explained_variance"}),
        ("ppo", "verifier", {"value_loss", "explained_variance"}),
        ("grpo", "reward_model", set()),
        ("grpo", "verifier", set()),
    ],
)
def test_an_iteration_changes_the_policy_and_leaves_its_state(copied, algorithm, reward, own):
    runner = copied(rl={"algorithm": algorithm, "reward": reward})
    runner.run("score@iter_001")
    metrics = runner.run(UPDATE)
    assert metrics.keys() >= EVERY_UPDATE | POLICY_GRADIENT | own
    assert metrics["logprob_gap_mean"] < 1e-5
    before = load_policy(runner.root / "artifacts/policies/sft/model")
    after = load_policy(runner.root / "artifacts/policies/iter_001/model")
    assert content_hash(before) != content_hash(after)
    state = runner.root / "artifacts/policies/iter_001/state"
    assert json.loads((state / "state.json").read_text())["steps"] == metrics["num_steps"] == 2
    assert (state / "critic/model.safetensors").exists() == (algorithm == "ppo")
    moments = load_file(state / "optimizer.safetensors")
    learners = {name.split("/")[0] for name in moments}
    assert learners == ({"policy", "critic"} if algorithm == "ppo" else {"policy"})


def test_the_next_iteration_goes_on_from_the_moments_and_the_critic(copied):
    runner = copied()
    runner.run(UPDATE)
    runner.run_iterations("iter_002")
    states = [runner.root / f"artifacts/policies/iter_00{i}/state" for i in (1, 2)]
    moments = [load_file(state / "optimizer.safetensors") for state in states]
    name = next(name for name in moments[0] if name.startswith("policy/step"))
    assert (float(moments[0][name]), float(moments[1][name])) == (2.0, 4.0)
    assert json.loads((states[1] / "state.json").read_text())["steps"] == 4
    assert runner.contents(states[0] / "critic") != runner.contents(states[1] / "critic")


def shifted(column, by):
    return lambda rows: [row.update({column: [x - by for x in row[column]]}) for row in rows]


REFUSED = {
    "rollouts of another policy": (
        ROLLOUTS,
        lambda rows: rows[3].update(policy_hash="0" * 64),
        "sampled by policy",
    ),
    "scores of other rollouts": (SCORES, lambda rows: rows.reverse(), "does not belong to"),
    "sampler log-probs far from the trainer's": (
        ROLLOUTS,
        shifted("logprobs", 0.2),
        r"differ by 0\.2 .*max_logprob_gap is 0\.05",
    ),
    "a policy far from the reference": (
        SCORES,
        shifted("ref_logprobs", 9),
        r"policy_update\.max_kl",
    ),
    "a reward that is not a number": (
        SCORES,
        lambda rows: rows[1].update(reward=float("nan")),
        "reward is nan for prompt {prompt}, sample 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_update_must_not_learn_from_is_refused(copied, name):
    artifact, change, said = REFUSED[name]
    runner = copied()
    rewrite(runner, artifact, change)
    prompt = runner.rows(SCORES)[1]["prompt_id"]
    with pytest.raises(StageError, match=said.format(prompt=prompt)):
        runner.run(UPDATE)


def test_weights_that_are_not_numbers_are_refused(copied):
    runner = copied()
    path = runner.root / "artifacts/base/model.safetensors"
    rewrite_weights(path, lambda tensors: tensors["model.norm.weight"][0].fill_(float("nan")))
    with pytest.raises(StageError, match=r"model\.norm\.weight has numbers that are not finite"):
        runner.run("sft")


@pytest.mark.parametrize("address", ["sft", "reward_model", UPDATE])
def test_a_stopped_and_resumed_stage_ends_with_the_same_bytes(copied, address):
    runner = copied()
    _, outs = runner.paths(address)

    def clear():
        for path in (*outs.values(), runner.root / "jobs" / address):
            path.unlink(True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    clear()
    metrics = runner.run(address)
    expected = {name: runner.contents(path) for name, path in outs.items()}
    clear()
    ctx = runner.context(address)
    log = ctx.log
    ctx.log = lambda step, metrics: (log(step, metrics), ctx.request_stop())
    with pytest.raises(Stopped):
        runner.run(address, ctx)
    assert not any(path.exists() for path in outs.values())
    assert runner.run(address) == metrics
    assert {name: runner.contents(path) for name, path in outs.items()} == expected


def test_two_clean_runs_leave_the_same_bytes(trained, runner):
    again = runner("again")
    for address, metrics in trained.metrics.items():
        assert again.run(address) == metrics
    one, two = (again.contents(root / "artifacts") for root in (trained.root, again.root))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


@pytest.mark.parametrize("reward", ["reward_model", "verifier"])
def test_the_evaluation_of_the_reference_is_at_no_distance_from_it(copied, reward):
    runner = copied(rl={"reward": reward})
    metrics = runner.run("evaluate_sft")
    assert metrics["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    assert metrics["num_prompts"] == 16
    rows = runner.rows("evaluations/sft/samples")
    assert sum(row["correct"] for row in rows) / 16 == metrics["accuracy"]
    assert {"accuracy_sampled", "reward_mean", "reward_std", "entropy"} <= metrics.keys()
    table = json.loads((runner.root / "jobs/evaluate_sft/tables/samples.json").read_text())
    assert list(table[0])[:3] == ["prompt", "response", "reward"]


def test_nothing_in_an_artifact_depends_on_the_hash_seed(trained, tmp_path):
    script = (
        "import sys; from pathlib import Path; from tests.stages.conftest import Runner\n"
        "Runner(Path(sys.argv[1])).run('prepare')"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=env, cwd=ROOT)
    for name in ("base", "data"):
        assert trained.contents(tmp_path / "artifacts" / name) == trained.contents(
            trained.root / "artifacts" / name
        )
