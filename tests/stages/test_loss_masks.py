"""Responses with tokens that the policy did not say: read as context, and learnt from by nobody.

Against every algorithm stands a loop over the policy's own tokens. Each sequence goes through the
model alone and whole; the others' tokens are passed by. What the columns say at those tokens is
nonsense, since nothing may look at it.
"""

import math
import statistics

import pytest
import torch

from stages.context import Context, StageError
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.data.batching import collate
from stages.data.segments import num_read
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Step
from stages.engines.training.optimizer import Learner
from stages.engines.training.rl_state import RlState
from stages.learning import policy_gradient
from stages.learning.imitation import imitation
from stages.learning.update import Update
from stages.policy_update import UPDATES, learn_by_policy_gradient
from stages.score import _summary
from tests.stages.test_ppo_by_hand import (
    assert_close,
    contexts,
    gradients,
    kept,
    models,
    said_by,
    watched,
)

pytestmark = pytest.mark.usefixtures("in_double")
PROMPTS = {"p0": [3, 4, 5], "p1": [6], "p2": [7, 8]}
SAMPLES = [
    ("p0", [9, 2, 7, 8, 3, 1], [1, 1, 0, 0, 1, 1], 1.0),
    ("p0", [4, 4, 1], [1, 0, 1], 0.25),
    ("p1", [2, 12, 5, 5, 5, 9, 1], [1, 0, 0, 1, 1, 0, 1], -0.5),
    ("p1", [11, 1], [1, 1], 0.5),
    ("p2", [3, 6, 8], [1, 1, 0], 2.0),
    ("p2", [3, 7, 7, 7, 1], [0, 1, 0, 0, 1], 0.75),
]
SEGMENTS = [
    ([4], [[11, 2]]),
    ([2], [[12]]),
    ([3, 6], [[5], [10, 9, 2]]),
    ([], []),
    ([], []),
    ([4], [[2, 2]]),
]
"""Where each sample was read from another history on, and which: one has three segments."""
GREEDY = {"p0": 0.5, "p1": 0.0, "p2": 1.0}
KL, ENTROPY, GAMMA, TEMPERATURE = 0.3, 0.05, 0.9, 0.7
GRADIENTS = ["grpo", "rloo", "remax", "reinforce", "reinforce_pp", "reinforce_pp_baseline"]


def rollouts(elided=False):
    rows = _rollouts()
    for row, (starts, histories) in zip(rows, SEGMENTS, strict=True) if elided else ():
        row |= {"segment_starts": starts, "segment_histories": histories}
    return rows


def _rollouts():
    return [
        {
            "prompt_id": prompt,
            "sample_index": index % 2,
            "policy_hash": "made up",
            "prompt_ids": PROMPTS[prompt],
            "response_ids": ids,
            "loss_mask": mask,
            "finish_reason": "stop",
            "logprobs": [-2.0 + 0.1 * at if said else 40.0 for at, said in enumerate(mask)],
            "ref_logprobs": [-2.5 + 0.2 * at if said else -60.0 for at, said in enumerate(mask)],
            "reward": reward,
            "support": None,
        }
        for index, (prompt, ids, mask, reward) in enumerate(SAMPLES)
    ]


@pytest.fixture
def gradient_of(tmp_path):
    """The gradient of the only step of an update, and its outcome."""

    def run(algorithm, micro_tokens, elided=False, **update):
        changes = {
            "learning_rate": 1e-3,
            "epochs": 1,
            "batch_size": len(SAMPLES),
            "max_grad_norm": 1e9,
            "max_logprob_gap": 1e3,
            "min_effective_samples": 0.0,
            "max_kl": 1e4,
            **update,
        }
        rl = {"algorithm": algorithm, "reward": "verifier"}
        if algorithm == "distill":
            rl["teacher"] = "somewhere"
        rollout = {"temperature": TEMPERATURE, "greedy_baseline": algorithm == "remax"}
        params = Params.model_validate({"policy_update": changes, "rl": rl, "rollout": rollout})
        config = bind("policy_update@iter_001", params).config
        policy = models()[0]
        learner = Learner(policy, Optimization(1e-3, 1e9))
        seen = watched(learner, policy)
        ctx = Context("update", "iter_001", seed=3, folder=tmp_path, micro_tokens=micro_tokens)
        state = RlState(0, None, {})
        greedy_of = GREEDY if algorithm == "remax" else {}
        learners = {"policy": learner}
        one = Update(config, {}, ctx, ALONE, state, learners, rollouts(elided), greedy_of)
        outcome = UPDATES.get(config.algorithm, learn_by_policy_gradient)(one)
        ((_, gradient),) = seen
        return gradient, outcome

    return run


def k1_penalties(row, logprobs):
    """What each of the policy's tokens pays, where the KL is part of the reward."""
    reference = kept(row, row["ref_logprobs"])
    return [KL * (p.item() - q) for p, q in zip(logprobs, reference, strict=True)]


def advantages_of(algorithm, rows, logprobs):
    """By response and by own token, from the definitions."""
    penalties = [k1_penalties(row, said) for row, said in zip(rows, logprobs, strict=True)]
    paid = [row["reward"] - sum(of) for row, of in zip(rows, penalties, strict=True)]
    others = lambda i: 1 - i % 2 + i // 2 * 2  # noqa: E731  (groups are pairs)
    flat = {
        "rloo": lambda i: paid[i] - paid[others(i)],
        "remax": lambda i: paid[i] - GREEDY[rows[i]["prompt_id"]],
        "grpo": lambda i: (
            (paid[i] - statistics.fmean([paid[i], paid[others(i)]]))
            / (statistics.stdev([paid[i], paid[others(i)]]) + 1e-6)
        ),
    }
    if algorithm in flat:
        return [[flat[algorithm](i)] * len(of) for i, of in enumerate(logprobs)]
    returns = []
    for i, (row, of) in enumerate(zip(rows, penalties, strict=True)):
        final = row["reward"]
        if algorithm == "reinforce_pp_baseline":
            final -= statistics.fmean([final, rows[others(i)]["reward"]])
        worth, found = 0.0, []
        for at in reversed(range(len(of))):
            worth = -of[at] + (final if at == len(of) - 1 else 0.0) + GAMMA * worth
            found.insert(0, worth)
        returns.append(found)
    every = [x for of in returns for x in of]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every) + 1e-8
    return [[(x - mean) / deviation for x in of] for of in returns]


@pytest.mark.parametrize("micro_tokens", [1000, 9])
@pytest.mark.parametrize("algorithm", GRADIENTS)
@pytest.mark.parametrize("elided", [False, True])
def test_a_policy_gradient_is_that_of_the_policys_own_tokens(
    gradient_of, algorithm, micro_tokens, elided
):
    gradient, outcome = gradient_of(
        algorithm, micro_tokens, elided, kl_coef=KL, kl_in="reward", kl_estimator="k1", gamma=GAMMA,
        entropy_coef=ENTROPY, whiten_advantages=True,
    )  # fmt: skip
    rows, policy = rollouts(elided), models()[0].eval()
    said = [said_by(policy, row, TEMPERATURE) for row in rows]
    advantages = advantages_of(algorithm, rows, [logprobs for logprobs, _ in said])
    # At the first step the ratio is 1, so the surrogate's gradient is the policy gradient.
    losses = [
        -advantage * (logprob - logprob.detach()).exp() - ENTROPY * entropy
        for (logprobs, entropies), of_row in zip(said, advantages, strict=True)
        for logprob, entropy, advantage in zip(logprobs, entropies, of_row, strict=True)
    ]
    torch.stack(losses).mean().backward()
    assert_close(gradient, gradients(policy))
    for row, found, expected in zip(rows, outcome.experience, advantages, strict=True):
        assert kept(row, found["advantages"]) == pytest.approx(expected, abs=1e-9)
        assert not any(torch.tensor(found["advantages"])[torch.tensor(row["loss_mask"]) == 0])
    gaps = [
        abs(x.item() - y)
        for row, (logprobs, _) in zip(rows, said, strict=True)
        for x, y in zip(logprobs, kept(row, row["logprobs"]), strict=True)
    ]
    assert outcome.metrics["logprob_gap_mean"] == pytest.approx(statistics.fmean(gaps), abs=1e-9)
    assert outcome.metrics["logprob_gap_max"] == pytest.approx(max(gaps), abs=1e-9)
    entropy = statistics.fmean(x.item() for _, of in said for x in of)
    assert outcome.history[0]["entropy"] == pytest.approx(entropy, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({}, False),
        ({"objective": "gspo"}, True),
        ({"aggregation": "sequence_mean_token_mean"}, True),
    ],
)  # fmt: skip
def test_segments_go_through_the_model_apart_where_their_losses_add_up(
    gradient_of, monkeypatch, settings, whole
):
    """A micro-batch is as large as its budget, not as the longest episode."""
    batches, make = [], policy_gradient.response_batch
    monkeypatch.setattr(
        policy_gradient, "response_batch", lambda *args: batches.append(make(*args)) or batches[-1]
    )
    gradient_of("grpo", 9, elided=True, **settings)
    most = max(num_read(row) for row in rollouts(elided=True))
    assert 9 < most == 12
    largest = max(len(batch.packed.ids) for batch in batches)
    assert largest == most if whole else largest <= 9


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "sequence_mean_token_sum"])
@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo", "gradient"])
@pytest.mark.parametrize("elided", [False, True])
def test_kl_in_the_loss_and_aggregation_count_own_tokens(
    gradient_of, objective, aggregation, elided
):
    gradient, outcome = gradient_of(
        "rloo", 9, elided, objective=objective, aggregation=aggregation, length_scale=5.0,
        kl_coef=KL, kl_in="loss", kl_estimator="k3", mismatch="sequence_truncate", mismatch_cap=1.1,
    )  # fmt: skip
    rows, policy = rollouts(elided), models()[0].eval()
    said = [said_by(policy, row, TEMPERATURE)[0] for row in rows]
    rewards = [row["reward"] for row in rows]
    of_sequences, divergences = [], []
    for i, (row, logprobs) in enumerate(zip(rows, said, strict=True)):
        advantage = rewards[i] - rewards[1 - i % 2 + i // 2 * 2]
        sampled = kept(row, row["logprobs"])
        gap = sum(x.item() - y for x, y in zip(logprobs, sampled, strict=True))
        weight = min(math.exp(min(gap, 20.0)), 1.1)
        losses = []
        for logprob, reference in zip(logprobs, kept(row, row["ref_logprobs"]), strict=True):
            k3 = (reference - logprob).exp() - 1 - (reference - logprob)
            divergences.append((logprob - reference).item())
            losses.append(-weight * advantage * logprob + KL * k3)
        scale = len(losses) if aggregation == "sequence_mean_token_mean" else 5.0
        of_sequences.append(torch.stack(losses).sum() / scale)
    torch.stack(of_sequences).mean().backward()
    assert_close(gradient, gradients(policy))
    reported = statistics.fmean(divergences)
    assert outcome.history[0]["kl_to_reference"] == pytest.approx(reported, abs=1e-9)


@pytest.mark.parametrize("micro_tokens", [1000, 9])
@pytest.mark.parametrize("elided", [False, True])
def test_iterated_dpo_sums_over_own_tokens(gradient_of, micro_tokens, elided):
    gradient, outcome = gradient_of("dpo", micro_tokens, elided, dpo_beta=0.4, dpo_nll_coef=0.2)
    rows, policy = rollouts(elided), models()[0].eval()
    said = [said_by(policy, row, TEMPERATURE)[0] for row in rows]
    losses, chosen_tokens = [], []
    for first in range(0, len(rows), 2):
        one, two = said[first], said[first + 1]
        better = one if rows[first]["reward"] > rows[first + 1]["reward"] else two
        worse = two if better is one else one
        # The reference is the policy as it is, so that all differences are 0.
        margin = sum(x - x.detach() for x in better) - sum(x - x.detach() for x in worse)
        losses.append(-torch.nn.functional.logsigmoid(0.4 * margin))
        chosen_tokens += better
    loss = torch.stack(losses).mean() - 0.2 * torch.stack(chosen_tokens).mean()
    loss.backward()
    assert_close(gradient, gradients(policy))
    assert outcome.history[0]["loss"] == pytest.approx(loss.item(), abs=1e-9)


@pytest.mark.parametrize("micro_tokens", [1000, 9])
@pytest.mark.parametrize("elided", [False, True])
def test_the_best_are_imitated_in_their_own_tokens(gradient_of, micro_tokens, elided):
    gradient, outcome = gradient_of("best_of_n", micro_tokens, elided, keep_best=1)
    rows, policy = rollouts(elided), models()[0].eval()
    best = [rows[0], rows[3], rows[4]]
    logprobs = [x for row in best for x in said_by(policy, row, 1.0)[0]]
    loss = -torch.stack(logprobs).mean()
    loss.backward()
    assert_close(gradient, gradients(policy))
    assert outcome.history[0]["loss"] == pytest.approx(loss.item(), abs=1e-9)


@pytest.mark.parametrize("top_k", [0, 13])
@pytest.mark.parametrize("elided", [False, True])
def test_a_teacher_is_asked_of_own_tokens(gradient_of, monkeypatch, top_k, elided):
    torch.manual_seed(5)
    teacher = models()[0].eval()
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    monkeypatch.setattr("stages.learning.distillation._load_teacher", lambda _: teacher)
    gradient, outcome = gradient_of("distill", 9, elided, distill_top_k=top_k)
    rows, policy = rollouts(elided), models()[0].eval()
    losses = []
    for row in rows:
        masks = iter(row["loss_mask"])
        for ids, first in contexts(row):
            student, wise = (
                torch.log_softmax(
                    model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / TEMPERATURE,
                    -1,
                )
                for model in (policy, teacher)
            )
            wise = wise.detach()
            for at in range(first, len(ids)):
                own, before = next(masks), at - 1
                if own and top_k:
                    divergence = student[before] - wise[before]
                    losses.append((student[before].exp() * divergence).sum())
                elif own:
                    one, two = student[before, ids[at]], wise[before, ids[at]]
                    losses.append((one.detach() - two) * one)
    torch.stack(losses).mean().backward()
    assert_close(gradient, gradients(policy), 1e-6 if top_k else 1e-9)
    if top_k:
        average = statistics.fmean(float(x.detach()) for x in losses)
        assert outcome.history[0]["distillation_kl"] == pytest.approx(average, abs=1e-9)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [4], [5, 2]])
def test_sft_learns_what_the_mask_leaves(rows):
    data, policy = rollouts(), models()[0].eval()
    work = imitation(
        policy,
        [row["prompt_ids"] for row in data],
        [row["response_ids"] for row in data],
        "cpu",
        str,
        [row["loss_mask"] if i != 3 else None for i, row in enumerate(data)],
    )
    found = work.loss(rows, Step(work.counts(rows), {}))
    found.value.backward()
    gradient = {name: value.clone() for name, value in gradients(policy).items()}
    policy.zero_grad()
    logprobs = [x for i in rows for x in said_by(policy, data[i], 1.0)[0]]
    expected = -torch.stack(logprobs).mean()
    expected.backward()
    assert found.value.item() == pytest.approx(expected.item(), abs=1e-12)
    assert_close(gradient, gradients(policy))


def test_a_demonstration_that_teaches_nothing_is_named():
    policy = models()[0]
    with pytest.raises(StageError, match="demonstration 1 has no token to learn from"):
        imitation(policy, [[3], [4]], [[5], [6, 1]], "cpu", "demonstration {}".format,
                  [None, [0, 0]])  # fmt: skip


@pytest.mark.parametrize("mask", [[1], [1, 0, 1], [1, 2]])
def test_a_mask_has_an_entry_for_each_token(mask):
    with pytest.raises(ValueError, match="response 1: a loss mask has a 0 or a 1"):
        collate([[3], [4]], [[5], [6, 1]], 0, loss_masks=[None, mask])


def test_supports_of_masked_tokens_are_left_out():
    policy = models()[0].eval()
    mask, support = [1, 0, 1], [[2, 5, 9], [], [1, 4]]
    batch = collate([[3, 4]], [[5, 7, 1]], 0, supports=[support], loss_masks=[mask])
    found = response_logprobs(policy, batch, TEMPERATURE).logprobs[0]
    logits = policy(input_ids=torch.tensor([[3, 4, 5, 7, 1]])).logits[0] / TEMPERATURE
    for at, (token, among) in {0: (5, [2, 5, 9]), 2: (1, [1, 4])}.items():
        of_support = torch.log_softmax(logits[1 + at, among], -1)[among.index(token)]
        torch.testing.assert_close(found[at], of_support)
    assert found[1] == 0.0


def test_the_kl_of_the_scores_is_a_mean_over_own_tokens():
    rows = [{**row, "greedy": False} for row in rollouts()]
    divergences = [
        p - q
        for row in rows
        for p, q in zip(kept(row, row["logprobs"]), kept(row, row["ref_logprobs"]), strict=True)
    ]
    said = _summary(rows, [0.0] * len(rows), {}, [row["ref_logprobs"] for row in rows])
    assert said["kl_to_reference"] == pytest.approx(statistics.fmean(divergences), abs=1e-6)
