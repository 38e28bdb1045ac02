"""experience.parquet: exactly the samples that an update trained on, and the advantages it used."""

import shutil
import statistics

import pyarrow.parquet as pq
import pytest

from stages.data import schema
from tests.stages.test_algorithms import ROLLOUT, SCORE, UPDATE, by

EXPERIENCE = "policies/iter_001/experience"


def keyed(table):
    return [(row["prompt_id"], row["sample_index"], row["role"]) for row in table]


def set_scores(run, reward_of, apart=0.0):
    """Rewards by hand, and a reference that finds every token `apart` nats less likely."""
    sampled = {(r["prompt_id"], r["sample_index"]): r for r in run.rows("rollouts/iter_001")}

    def score(row):
        of = sampled[row["prompt_id"], row["sample_index"]]
        return {"reward": reward_of(of), "ref_logprobs": [x - apart for x in of["logprobs"]]}

    run.rewrite("scores/iter_001", score)
    return sampled


def test_the_advantages_of_grpo_are_those_of_rewards_and_kl_by_hand(go_on):
    """Dynamic sampling keeps three groups of eight; an overlong response is left out of them."""
    changes = by("grpo", {"prompts": 3, "reserve": 5}, kl_coef=0.3, overlong_filter=True)
    run, _ = go_on("run", [ROLLOUT, SCORE], changes)
    prompts = sorted({row["prompt_id"] for row in run.rows("rollouts/iter_001")})
    varied = prompts[2:5]
    sampled = set_scores(
        run,
        lambda row: [1.0, 0.25, -0.5][row["sample_index"]] * (row["prompt_id"] in varied),
        apart=0.1,
    )
    cut = (varied[1], 2)
    ends = lambda row: "length" if (row["prompt_id"], row["sample_index"]) == cut else "stop"  # noqa: E731
    run.rewrite("rollouts/iter_001", lambda row: {"finish_reason": ends(row)})
    run.run(UPDATE)
    found = run.rows(EXPERIENCE)
    wanted = [(p, i, "policy_gradient") for p in varied for i in range(3) if (p, i) != cut]
    assert keyed(found) == wanted
    for row in found:
        group = [sampled[row["prompt_id"], i] for i in range(3)]
        paid = [
            reward - 0.3 * 0.1 * len(of["response_ids"])
            for reward, of in zip([1.0, 0.25, -0.5], group, strict=True)
        ]
        own = paid[row["sample_index"]]
        # The group's spread is over n - 1.
        advantage = (own - statistics.fmean(paid)) / statistics.stdev(paid)
        length = len(group[row["sample_index"]]["response_ids"])
        assert row["reward"] == [1.0, 0.25, -0.5][row["sample_index"]]
        assert row["advantages"] == pytest.approx([advantage] * length, abs=2e-3)


def test_the_advantages_of_ppo_are_discounted_rewards_under_a_critic_that_says_nothing(go_on):
    changes = by("ppo", critic="policy", critic_warmup_epochs=0, whiten_advantages=False,
                 gamma=0.9, gae_lambda=1.0, kl_coef=0.5)  # fmt: skip
    run, _ = go_on("run", [], changes)
    sampled = set_scores(run, lambda row: 2.0 + row["sample_index"], apart=0.1)
    run.run(UPDATE)
    found = run.rows(EXPERIENCE)
    assert [key[:2] for key in keyed(found)] == sorted(sampled)
    for row in found:
        left = len(sampled[row["prompt_id"], row["sample_index"]]["response_ids"])
        worth, expected = 0.0, []
        for token in reversed(range(left)):
            final = row["reward"] if token == left - 1 else 0.0
            worth = final - 0.5 * 0.1 + 0.9 * worth
            expected.insert(0, worth)
        assert row["advantages"] == pytest.approx(expected, abs=1e-4)


def test_whitened_advantages_are_listed_as_the_loss_had_them(go_on):
    run, metrics = go_on("run", [UPDATE], by("reinforce"))
    listed = [x for row in run.rows(EXPERIENCE) for x in row["advantages"]]
    assert statistics.fmean(listed) == pytest.approx(0, abs=1e-5)
    assert statistics.pstdev(listed) == pytest.approx(metrics["advantage_std"], abs=1e-5)


def test_pairs_list_the_best_as_chosen_and_the_worst_as_rejected(go_on):
    run, _ = go_on("run", [], by("dpo"))
    sampled = set_scores(run, lambda row: float(row["sample_index"]))
    same = {}  # a prompt whose best and worst say the same makes no pair
    for (prompt, index), row in sampled.items():
        same.setdefault(prompt, {})[index] = row["response_ids"]
    paired = sorted(prompt for prompt, of in same.items() if of[0] != of[2])
    run.run(UPDATE)
    found = run.rows(EXPERIENCE)
    assert keyed(found) == [
        key for prompt in paired for key in ((prompt, 0, "rejected"), (prompt, 2, "chosen"))
    ]
    assert all(row["advantages"] is None for row in found)
    assert [row["reward"] for row in found] == [0.0, 2.0] * len(paired)


def test_where_demonstrations_are_chosen_only_samples_are_listed(go_on):
    changes = by("dpo", {"source": "demonstrations", "samples": 1}, chosen="demonstrations")
    run, metrics = go_on("run", [ROLLOUT, SCORE, UPDATE], changes)
    found = run.rows(EXPERIENCE)
    assert {row["role"] for row in found} == {"rejected"}
    assert len(found) == metrics["num_pairs"]


def test_the_best_of_n_lists_what_was_kept(go_on):
    run, _ = go_on("run", [], by("best_of_n", keep_best=2))
    set_scores(run, lambda row: float(row["sample_index"]))
    run.rewrite("rollouts/iter_001", lambda _: {"finish_reason": "stop"})
    run.run(UPDATE)
    prompts = sorted({row["prompt_id"] for row in run.rows("rollouts/iter_001")})
    found = run.rows(EXPERIENCE)
    assert keyed(found) == [(p, i, "imitated") for p in prompts for i in (1, 2)]
    assert all(row["advantages"] is None for row in found)


def test_distillation_lists_advantages_where_it_has_them(go_on):
    for top_k in (0, 4):
        run, _ = go_on(f"top {top_k}", [UPDATE], by("distill", distill_top_k=top_k))
        found = run.rows(EXPERIENCE)
        sampled = run.rows("rollouts/iter_001")
        assert keyed(found) == [(r["prompt_id"], r["sample_index"], "distilled") for r in sampled]
        lengths = [None if top_k else len(row["response_ids"]) for row in sampled]
        assert [row["advantages"] and len(row["advantages"]) for row in found] == lengths


def test_a_second_run_writes_the_same_bytes_under_the_declared_schema(go_on):
    contents = []
    for name in ("first", "second"):
        run, _ = go_on(name, [UPDATE], by("ppo"))
        path = run.root / f"artifacts/{EXPERIENCE}.parquet"
        assert pq.read_schema(path).equals(schema.columns_of(schema.ExperienceRow))
        contents.append(path.read_bytes())
        shutil.rmtree(run.root)
    assert contents[0] == contents[1]
