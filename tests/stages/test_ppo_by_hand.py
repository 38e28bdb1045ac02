"""PPO's update against the same one computed by hand: one response at a time, one token at a time.

No batch, no padding and no packing on that side: each sequence goes through the model alone, and
every formula is a loop over its tokens. Some responses end with the end token, others were cut. The
sampler was another policy, as where sampling runs ahead. In most of the cases some tokens were said
by somebody else: the loops read them and pass them by. In some, each turn is paid by itself, and in
some old observations were elided: each token is read in the context it was sampled from, and all
else is chained as if there were one.
"""

import math
import statistics

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.context import Context
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner
from stages.engines.training.rl_state import RlState
from stages.learning import experience, policy_gradient
from stages.learning.update import Update

pytestmark = pytest.mark.usefixtures("in_double")
END = 1
LENGTHS = [(2, 5), (1, 1), (4, 3), (3, 7), (2, 1), (5, 6), (1, 4), (2, 2), (3, 5), (1, 7), (6, 3)]
"""Tokens of each prompt and of its response."""
MODEL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "eos_token_id": END,
    "initializer_range": 0.4,
}
PPO = {
    "gae_lambda": 0.5,
    "gamma": 0.9,
    "kl_coef": 0.2,
    "entropy_coef": 0.03,
    "learning_rate": 0.02,
    "critic_learning_rate": 0.03,
    "warmup_steps": 0,
    "critic_warmup_epochs": 2,
    "value_clip": 0.1,
    "epochs": 2,
    "batch_size": 5,
    "max_grad_norm": 1e9,
    "mismatch": "token_truncate",
    "mismatch_cap": 1.5,
    "max_logprob_gap": 100.0,
    "min_effective_samples": 0.0,
    "max_kl": 1000.0,
}


TURN_DISCOUNT = 0.6


def config(by_turn=False):
    changes = {
        "policy_update": PPO,
        "rl": {"algorithm": "ppo", "reward": "verifier"},
        "rollout": {"temperature": 0.7},
    }
    if by_turn:
        changes["rl"] |= {
            "reward": "game", "turn_credit": "turn", "turn_discount": TURN_DISCOUNT
        }  # fmt: skip
        changes["rewards"] = {"game": {"kind": "environment"}}
        changes["rollout"] |= {"environment": "guess", "max_turns": 1}
    params = Params.model_validate(changes)
    return bind("policy_update@iter_001", params).config


def masked_at(position, length):
    """Some tokens in the middle, and of the longest responses the last one."""
    return position % 3 == 1 and (position < length - 1 or length == 5)


def kept(row, values):
    """Those of the tokens that the policy said."""
    mask = row["loss_mask"] or [1] * len(values)
    return [value for value, said in zip(values, mask, strict=True) if said]


def rollouts(seed, masked=False):
    """Scored rows; of every second one the last token is the end token, and nothing follows it."""
    draw = torch.Generator().manual_seed(seed)
    number = lambda: float(torch.randn((), generator=draw))  # noqa: E731
    token = lambda: int(torch.randint(2, MODEL["vocab_size"], (), generator=draw))  # noqa: E731
    rows = []
    for row, (prompt, response) in enumerate(LENGTHS):
        ends = row % 2 == 0
        said = [token() for _ in range(response)]
        rows.append(
            {
                "prompt_id": f"p{row // 2}",
                "sample_index": row % 2,
                "policy_hash": "made up",
                "prompt_ids": [token() for _ in range(prompt)],
                "response_ids": [*said[:-1], END] if ends else said,
                "finish_reason": "stop" if ends else "length",
                "logprobs": [-2.0 + 0.5 * number() for _ in range(response)],
                "ref_logprobs": [-2.0 + 0.3 * number() for _ in range(response)],
                "reward": number(),
                "support": None,
                "loss_mask": [int(not masked_at(i, response)) for i in range(response)]
                if masked
                else None,
            }
        )
    return rows


def in_turns(rows):
    """The same rows, but that several of the policy's tokens end a turn and are paid."""
    for row in rows:
        own = [at for at, said in enumerate(row["loss_mask"]) if said]
        row["turn_ends"] = sorted({*own[1:-1:2], own[-1]})
        row["reward_by_turn"] = [0.3 * at - 0.7 for at in row["turn_ends"]]
        row["reward"] = 1e6  # of which nothing may be learnt: it is in the shares
    return rows


def in_segments(rows):
    """The same rows, but that after a masked token some of the policy's were sampled from another
    context: up to three of them in a row."""
    draw = torch.Generator().manual_seed(11)
    for number, row in enumerate(rows):
        mask = row["loss_mask"]
        starts = [at for at in range(1, len(mask)) if mask[at] and not mask[at - 1]][:2]
        row["segment_starts"] = starts
        row["segment_histories"] = [
            torch.randint(2, MODEL["vocab_size"], (2 + number % 3,), generator=draw).tolist()
            for _ in starts
        ]
    assert {len(row["segment_starts"]) for row in rows} == {0, 1, 2}
    return rows


def models():
    """A policy and a critic, the same at every call."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model("llama", **MODEL, num_labels=1)
    kinds = (AutoModelForCausalLM, AutoModelForSequenceClassification)
    return [kind.from_config(shape).double() for kind in kinds]


def watched(learner, model):
    """Weights and gradients of a model, as they are at every step of its learner."""
    seen, clip = [], learner.clip_gradients

    def look_and_clip():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.append((weights, {name: p.grad.clone() for name, p in model.named_parameters()}))
        return clip()

    learner.clip_gradients = look_and_clip
    return seen


@pytest.fixture
def update_of(tmp_path, monkeypatch):
    """Runs an update; what it learnt from, and weights and gradients at every step, by learner."""

    def run(rows, micro_tokens):
        learners, seen = {}, {}
        for who, model in zip(("policy", "critic"), models(), strict=True):
            rate = PPO["learning_rate" if who == "policy" else "critic_learning_rate"]
            learners[who] = Learner(model, Optimization(rate, PPO["max_grad_norm"]))
            seen[who] = watched(learners[who], model)
        learnt_from = []
        build = experience.experience_of
        monkeypatch.setattr(
            policy_gradient,
            "experience_of",
            lambda *args: learnt_from.append(build(*args)) or learnt_from[-1],
        )
        ctx = Context("update", "iter_001", seed=3, folder=tmp_path, micro_tokens=micro_tokens)
        update = Update(
            config("turn_ends" in rows[0]), {}, ctx, ALONE, RlState(0, None, {}), learners, rows, {}
        )
        outcome = policy_gradient.learn_by_policy_gradient(update)
        return update, learnt_from[0], seen, outcome.history

    return run


def contexts(row):
    """What is read of a row at a time, by where its first token of the response stands in it.

    One sequence, or where old observations were elided one for each segment: each goes on to where
    the next begins, with what nobody learns from at its end.
    """
    starts = [0, *row.get("segment_starts", [])]
    histories = [[], *row.get("segment_histories", [])]
    stops = [*starts[1:], len(row["response_ids"])]
    for start, stop, history in zip(starts, stops, histories, strict=True):
        before = row["prompt_ids"] + history
        yield before + row["response_ids"][start:stop], len(before)


def said_by(model, row, temperature):
    """Log-prob and entropy of each token of a response, from what was read before it alone."""
    logprobs, entropies = [], []
    for ids, first in contexts(row):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for position in range(first, len(ids)):
            distribution = torch.log_softmax(logits[position - 1] / temperature, dim=-1)
            logprobs.append(distribution[ids[position]])
            entropies.append(-(distribution.exp() * distribution).sum())
    return kept(row, logprobs), kept(row, entropies)


def values_by(critic, row):
    """What the critic says at the token before each token of a response."""
    values = []
    for ids, first in contexts(row):
        read = torch.tensor([ids])
        hidden = critic.base_model(input_ids=read, use_cache=False).last_hidden_state
        scores = critic.score(hidden)[0, :, 0]
        values += [scores[at - 1] for at in range(first, len(ids))]
    return kept(row, values)


def worth_of(row, old, values):
    """By token the advantage and return of GAE, and what is really paid from there on.

    The reward comes with the last token, end token or not, and nothing after it is worth anything.
    """
    paid = [
        -PPO["kl_coef"] * (logprob - reference)
        for logprob, reference in zip(old, kept(row, row["ref_logprobs"]), strict=True)
    ]
    gammas = [PPO["gamma"]] * len(paid)
    if "turn_ends" in row:
        own = kept(row, range(len(row["response_ids"])))
        for end, reward in zip(row["turn_ends"], row["reward_by_turn"], strict=True):
            paid[own.index(end)] += reward
            gammas[own.index(end)] *= TURN_DISCOUNT
    else:
        paid[-1] += row["reward"]
    advantages, returns = [], []
    following_value = following = 0.0
    for reward, value, gamma in zip(*map(reversed, (paid, values, gammas)), strict=True):
        delta = reward + gamma * following_value - value
        following = delta + gamma * PPO["gae_lambda"] * following
        following_value = value
        advantages.insert(0, following)
        returns.insert(0, following + value)
    worth, discounted = 0.0, []
    for reward, gamma in zip(reversed(paid), reversed(gammas), strict=True):
        worth = reward + gamma * worth
        discounted.insert(0, worth)
    return advantages, returns, discounted


def loaded(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.zero_grad()
    return model.eval()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, expected, bound=1e-9):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        scale = max(float(expected[name].abs().max()), 1e-6)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=bound * scale, msg=name)


def value_losses(critic, row, old, targets, clip):
    """Half the squared error at each token, or that of a value held near the old one if worse."""
    losses = []
    for value, before, target in zip(values_by(critic, row), old, targets, strict=True):
        error = (value - target) ** 2
        if clip:
            near = value.clamp(before - clip, before + clip)
            error = torch.maximum(error, (near - target) ** 2)
        losses.append(0.5 * error)
    return losses


def policy_losses(policy, row, old, advantages, temperature):
    """By token the clipped surrogate, weighed against the sampler's mismatch, less the bonus.

    With it the sum of the entropies, and how many ratios were held.
    """
    losses, held = [], 0
    logprobs, entropies = said_by(policy, row, temperature)
    for logprob, entropy, before, advantage, sampled in zip(
        logprobs, entropies, old, advantages, kept(row, row["logprobs"]), strict=True
    ):
        ratio = (logprob - before).exp()
        near = ratio.clamp(0.8, 1.2)
        held += bool(ratio != near)
        surrogate = torch.minimum(ratio * advantage, near * advantage)
        weight = min(math.exp(before - sampled), PPO["mismatch_cap"])
        losses.append(-weight * surrogate - PPO["entropy_coef"] * entropy)
    return losses, torch.stack(entropies).sum().item(), held


@pytest.mark.parametrize("case", ["all said", "some masked", "by turn", "elided", "elided by turn"])
@pytest.mark.parametrize("micro_tokens", [1000, 14])
def test_every_number_of_an_update_is_that_of_the_responses_one_by_one(
    update_of, micro_tokens, case
):
    rows = rollouts(seed=0, masked=case != "all said")
    if "by turn" in case:
        rows = in_turns(rows)
    if "elided" in case:
        rows = in_segments(rows)
    update, learnt_from, seen, history = update_of(rows, micro_tokens)
    temperature = update.config.temperature
    policy, critic = models()
    plan = update.plan(len(rows))
    fits = len(seen["critic"]) - len(seen["policy"])
    assert (fits, len(seen["policy"])) == (6, 6)

    with torch.no_grad():
        loaded(policy, seen["policy"][0][0])
        old = [[float(x) for x in said_by(policy, row, temperature)[0]] for row in rows]
        loaded(critic, seen["critic"][fits][0])
        values = [[float(x) for x in values_by(critic, row)] for row in rows]
    advantages, returns, paid = zip(*map(worth_of, rows, old, values), strict=True)
    raw = [x for of_row in advantages for x in of_row]
    mean, deviation = statistics.fmean(raw), statistics.pstdev(raw)
    white = [[(x - mean) / (deviation + 1e-8) for x in of_row] for of_row in advantages]
    for i, row in enumerate(rows):
        length = len(row["response_ids"])
        for found, expected in (
            (learnt_from.logprobs, old[i]),
            (learnt_from.values, values[i]),
            (learnt_from.advantages, white[i]),
            (learnt_from.returns, returns[i]),
            (learnt_from.mask, [1.0] * len(old[i])),
        ):
            assert kept(row, found[i, :length].tolist()) == pytest.approx(expected, abs=1e-9)
            assert not found[i, learnt_from.mask[i] == 0].any()

    for step, (weights, found) in enumerate(seen["critic"][:fits]):
        loaded(critic, weights)
        losses = [
            loss
            for i in plan.rows(step)
            for loss in value_losses(critic, rows[i], *2 * [paid[i]], None)
        ]
        torch.stack(losses).mean().backward()
        assert_close(found, gradients(critic))

    all_held = 0
    for step, (weights, found) in enumerate(seen["policy"]):
        loaded(policy, weights)
        loaded(critic, seen["critic"][fits + step][0])
        losses, uncertainty = [], 0.0
        for i in plan.rows(step):
            of_row, entropy, held = policy_losses(policy, rows[i], old[i], white[i], temperature)
            of_critic = value_losses(critic, rows[i], values[i], returns[i], PPO["value_clip"])
            losses += [one + two for one, two in zip(of_row, of_critic, strict=True)]
            uncertainty += entropy
            all_held += held
        loss = torch.stack(losses).mean()
        loss.backward()
        assert_close(found, gradients(policy))
        assert_close(seen["critic"][fits + step][1], gradients(critic))
        assert history[step]["loss"] == pytest.approx(loss.item(), abs=1e-9)
        assert history[step]["entropy"] == pytest.approx(uncertainty / len(losses), abs=1e-9)
    assert all_held > 15, "the policy has to move for its ratios to count"
