"""Rewards of turns: kept where they were paid, shared out by score, and learnt from turn by turn.

Against what an update learns stands a loop over episodes, turns and the policy's own tokens. Groups
have episodes of unequal length, and what the columns say at observations is nonsense.
"""

import shutil
import statistics
from contextlib import suppress

import pyarrow.parquet as pq
import pytest
import torch

from stages import score
from stages.context import Context, ShareDone, StageError, Stopped
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.data.tokenizer import Decoder
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner
from stages.engines.training.rl_state import RlState
from stages.environments.turns import TurnTemplate
from stages.learning.policy_gradient import learn_by_policy_gradient
from stages.learning.update import Update
from tests.stages.test_online import OVERLAP, AskedAt, contents
from tests.stages.test_ppo_by_hand import kept, models, said_by

KL, GAMMA, TURN_DISCOUNT, TEMPERATURE = 0.3, 0.9, 0.5, 0.7
EPISODES = [
    # prompt, own tokens, last token of each turn, reward of each turn
    ("p0", [1, 1, 0, 0, 1, 1, 0, 1], [1, 5, 7], [0.5, -1.0, 2.0]),
    ("p0", [1, 0, 1], [0, 2], [1.0, 0.25]),
    ("p0", [1, 1, 1], [2], [-0.5]),
    ("p1", [1, 0, 0, 1, 1], [0, 4], [0.0, 3.0]),
    ("p1", [1, 1, 0, 1], [0, 1, 3], [1.0, -2.0, 0.5]),  # its second turn follows at once
]


HISTORIES = [[7, 2], [11], [4, 4, 9]]
ELIDED = [[4, 7], [2], [], [3], []]
"""Where in each episode the policy read another history: one is in three segments."""


def scored(elided=False):
    rows = _scored()
    for row, starts in zip(rows, ELIDED, strict=True) if elided else ():
        row["segment_starts"] = starts
        row["segment_histories"] = HISTORIES[: len(starts)]
    return rows


def _scored():
    draw = torch.Generator().manual_seed(3)
    return [
        {
            "prompt_id": prompt,
            "sample_index": index,
            "policy_hash": "made up",
            "prompt_ids": [3, 4, 5],
            "response_ids": torch.randint(2, 13, (len(mask),), generator=draw).tolist(),
            "loss_mask": mask,
            "finish_reason": "stop",
            "logprobs": [-2.0 + 0.1 * at if own else 40.0 for at, own in enumerate(mask)],
            "ref_logprobs": [-2.5 + 0.2 * at if own else -60.0 for at, own in enumerate(mask)],
            "support": None,
            "reward": 1e6,  # of which nothing may be learnt: it is in the shares
            "turn_ends": ends,
            "reward_by_turn": rewards,
        }
        for index, (prompt, mask, ends, rewards) in enumerate(EPISODES)
    ]


@pytest.fixture
def learnt(tmp_path):
    """The advantages that an update gives each token of each row."""

    def run(algorithm, elided=False, **update):
        changes = {
            "learning_rate": 1e-3, "epochs": 1, "max_logprob_gap": 1e3, "gamma": GAMMA,
            "min_effective_samples": 0.0, "max_kl": 1e4, "kl_coef": KL, **update,
        }  # fmt: skip
        rl = {"algorithm": algorithm, "reward": "game", "turn_credit": "turn"}
        params = Params.model_validate(
            {
                "policy_update": changes,
                "rl": {**rl, "turn_discount": TURN_DISCOUNT},
                "rewards": {"game": {"kind": "environment"}},
                "rollout": {"temperature": TEMPERATURE, "environment": "guess", "max_turns": 1},
            }
        )
        config = bind("policy_update@iter_001", params).config
        learners = {"policy": Learner(models()[0], Optimization(1e-3, 1e9))}
        ctx = Context("update", "iter_001", seed=3, folder=tmp_path, micro_tokens=1000)
        rows = scored(elided)
        update = Update(config, {}, ctx, ALONE, RlState(0, None, {}), learners, rows, {})
        rows = learn_by_policy_gradient(update).experience
        return [row["advantages"] for row in rows]

    return run


def paid_tokens(row, policy):
    """By own token: its place in the response, what it is paid, and whether it ends a turn."""
    places = kept(row, range(len(row["response_ids"])))
    by_end = dict(zip(row["turn_ends"], row["reward_by_turn"], strict=True))
    old, reference = said_by(policy, row, TEMPERATURE)[0], kept(row, row["ref_logprobs"])
    return [
        (place, by_end.get(place, 0.0) - KL * (p.item() - q), place in by_end)
        for place, p, q in zip(places, old, reference, strict=True)
    ]


def in_turns(tokens):
    """The tokens of each turn."""
    turns = [[]]
    for token in tokens:
        turns[-1].append(token)
        if token[2]:
            turns.append([])
    assert not turns.pop()
    return turns


def assert_same(found, expected):
    for row, advantages, by_place in zip(scored(), found, expected, strict=True):
        whole = [by_place.get(place, 0.0) for place in range(len(row["response_ids"]))]
        assert advantages == pytest.approx(whole, abs=1e-9)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("rloo", {}),
        ("grpo", {}),
        ("grpo", {"normalise_by_std": False}),
        ("grpo", {"leave_one_out": True}),
    ],
)
@pytest.mark.parametrize("elided", [False, True])
def test_a_turn_is_compared_with_the_same_turn_of_the_other_episodes(
    learnt, algorithm, settings, elided
):
    policy, rows = models()[0].eval(), scored(elided)
    turns = [in_turns(paid_tokens(row, policy)) for row in rows]
    worth = []
    for episode in turns:
        paid = [sum(reward for _, reward, _ in turn) for turn in episode]
        worth.append(
            [
                sum(TURN_DISCOUNT ** (k - t) * paid[k] for k in range(t, len(paid)))
                for t in range(len(paid))
            ]
        )
    expected = []
    for i, row in enumerate(rows):
        by_place = {}
        for t, turn in enumerate(turns[i]):
            same = [
                worth[j][t]
                for j, other in enumerate(rows)
                if other["prompt_id"] == row["prompt_id"] and len(turns[j]) > t
            ]
            rest = [*same]
            rest.remove(worth[i][t])
            compared = rest if algorithm == "rloo" or settings.get("leave_one_out") else same
            advantage = worth[i][t] - statistics.fmean(compared) if rest else 0.0
            if algorithm == "grpo" and settings.get("normalise_by_std", True) and rest:
                deviation = statistics.stdev(compared) if len(compared) > 1 else 0.0
                advantage /= (deviation + 1e-6) if deviation else 1.0
            by_place |= {place: advantage for place, _, _ in turn}
        expected.append(by_place)
    assert len({round(x, 6) for by_place in expected for x in by_place.values()}) > 6
    assert_same(learnt(algorithm, elided, **settings), expected)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("algorithm", ["reinforce", "reinforce_pp"])
@pytest.mark.parametrize("elided", [False, True])
def test_returns_by_token_are_discounted_again_where_a_turn_ends(learnt, algorithm, elided):
    policy, returns = models()[0].eval(), []
    for row in scored(elided):
        worth, by_place = 0.0, {}
        for place, paid, ends in reversed(paid_tokens(row, policy)):
            worth = paid + GAMMA * (TURN_DISCOUNT if ends else 1.0) * worth
            by_place[place] = worth
        returns.append(by_place)
    every = [x for by_place in returns for x in by_place.values()]
    mean, deviation = statistics.fmean(every), statistics.pstdev(every) + 1e-8
    white = [{at: (x - mean) / deviation for at, x in by_place.items()} for by_place in returns]
    assert_same(learnt(algorithm, elided), white)


PAYS = '''
from stages.environments.environment import Environment, Observation


class Pays(Environment):
    """Pays every turn by how long it was, and is over after as many as the seed says."""

    stops = (";",)

    def reset(self, row, seed):
        self.left, self.turn = 1 + seed % 4, 0

    def step(self, action):
        self.left, self.turn = self.left - 1, self.turn + 1
        reward = 0.1 * len(action) - 0.7 * self.turn
        return Observation(f"{len(action) % 10}+", reward=reward, done=not self.left)


class Breaks(Pays):
    def step(self, action):
        if self.turn == 1:
            raise KeyError("no such tool")
        return super().step(action)


class Talks(Pays):
    def step(self, action):
        return Observation("123456789", reward=0.1)
'''
ROLLOUT, SCORE, UPDATE = (f"{stage}@iter_001" for stage in ("rollout", "score", "policy_update"))


@pytest.fixture
def playing(copied):
    """A copy of the trained run, whose rewards are credited by turn."""

    def copy(name="run", environment="Pays", rl=None, **changes):
        rollout = {
            "environment": f"pays:{environment}", "max_turns": 3, "max_new_tokens": 14,
            "temperature": 1.5, "prompts": 6, "samples": 3, "batch_size": 4,
            "max_observation_tokens": 8,
        }  # fmt: skip
        rl = {
            "reward": "game", "algorithm": "rloo", "turn_credit": "turn", "turn_discount": 0.8,
            **(rl or {}),
        }  # fmt: skip
        rewards = {
            "game": {"kind": "environment"},
            "short": {"kind": "length", "unit": "characters", "target": 3, "width": 6},
        }
        run = copied(name, rollout=rollout, rl=rl, rewards=rewards, **changes)
        for path in ("artifacts/rollouts", "jobs"):
            shutil.rmtree(run.root / path)
        (run.root / "environments/pays.py").write_text(PAYS)
        for source in rewards:
            run.run(f"reward_source@{source}")
        return run

    return copy


def test_shares_are_what_turns_were_paid_and_the_last_has_all_else(playing):
    weights = {"game": 0.3, "short": 2.0}
    run = playing(score={"weights": weights, "missing_eos_penalty": 0.25})
    run.run(ROLLOUT)
    run.run(SCORE)
    played = run.rows("rollouts/iter_001")
    assert len({len(row["turn_ends"]) for row in played}) == 3
    assert {row["finish_reason"] for row in played} == {"stop", "length"}
    for row, scored_row in zip(played, run.rows("scores/iter_001"), strict=True):
        assert row["environment_reward"] == pytest.approx(sum(row["turn_rewards"]), abs=1e-6)
        shares = [0.3 * paid for paid in row["turn_rewards"]]
        shares[-1] += 2.0 * dict(scored_row["by_source"])["short"]
        shares[-1] -= 0.25 * (row["finish_reason"] == "length")
        assert scored_row["reward_by_turn"] == pytest.approx(shares, abs=1e-6)
        assert scored_row["reward"] == pytest.approx(sum(shares), abs=1e-5)


def test_an_episode_that_is_credited_as_a_whole_has_no_shares(playing):
    run = playing(rl={"turn_credit": "episode", "turn_discount": 1.0})
    run.run(ROLLOUT)
    run.run(SCORE)
    assert all("reward_by_turn" not in row for row in run.rows("scores/iter_001"))


def test_no_observation_is_learnt_from(playing):
    run = playing()
    for address in (ROLLOUT, SCORE, UPDATE):
        run.run(address)
    rows = run.rows("rollouts/iter_001")
    experience = run.rows("policies/iter_001/experience")
    observed = 0
    for row, of_row in zip(rows, experience, strict=True):
        assert (row["prompt_id"], row["sample_index"]) == (
            of_row["prompt_id"], of_row["sample_index"]
        )  # fmt: skip
        for at, own in enumerate(row["loss_mask"]):
            if not own:
                observed += 1
                assert of_row["advantages"][at] == row["logprobs"][at] == 0.0
                assert at not in row["turn_ends"]
    assert observed
    by_turn = [len(set(filter(None, row["advantages"]))) for row in experience]
    assert max(by_turn) > 1


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_fused_steps_credit_what_chained_iterations_do(playing, algorithm):
    rl = {
        "algorithm": algorithm,
        "iterations": {"fast_001": {"policy": "sft"}, "fast_002": {"policy": "fast_001"}},
        "online": {"fast": {"policy": "sft", "steps": 2}},
    }  # fmt: skip
    run = playing(rl=rl, score={"weights": {"game": 0.3, "short": 2.0}})
    run.run_iterations("fast_001", "fast_002")
    run.run("online@fast")
    chained = run.contents(run.root / "artifacts/policies/fast_002/model")
    assert run.contents(run.root / "artifacts/policies/fast/model") == chained
    for kind in ("rollouts", "scores"):
        together = run.rows(f"{kind}/fast")
        for step in (1, 2):
            alone = run.rows(f"{kind}/fast_00{step}")
            assert [row for row in together if row["step"] == step] == [
                {"step": step, **row} for row in alone
            ]


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
def test_fused_steps_that_are_stopped_time_and_again_end_with_the_same_bytes(playing, changes):
    rl = {"algorithm": "grpo", "online": {"fast": {"policy": "sft", "steps": 2}}}
    undisturbed, stopped = (playing(name, rl=rl, **changes) for name in ("undisturbed", "stopped"))
    undisturbed.run("online@fast")
    stops = 0
    # Each attempt lasts longer: one that ends before any unit of episodes is over leaves nothing.
    for questions in range(5, 500, 7):
        ctx = stopped.context("online@fast", checkpoint_seconds=0.0, _stop=AskedAt(questions))
        try:
            stopped.run("online@fast", ctx)
            break
        except Stopped:
            stops += 1
    assert stops > 2
    assert contents(stopped) == contents(undisturbed)


def test_scores_by_shards_are_those_of_one_process(playing):
    whole, cut = playing("whole"), playing("cut")
    for run in (whole, cut):
        run.run(ROLLOUT)
    whole.run(SCORE)
    bound, (inputs, outs) = bind(SCORE, cut.params), cut.paths(SCORE)
    with suppress(ShareDone):
        score.run(bound.config, inputs, outs, cut.context(SCORE, shard=1, num_shards=2))
    score.run(bound.config, inputs, outs, cut.context(SCORE, shard=0, num_shards=2))
    scores = [run.contents(run.root / "artifacts/scores") for run in (whole, cut)]
    assert scores[0] == scores[1]


def test_the_reward_of_a_failed_episode_stands_for_what_was_paid_before(playing):
    run = playing(environment="Breaks", episodes={"failed": "end", "failed_reward": -0.75})
    run.run(ROLLOUT)
    failed = [row for row in run.rows("rollouts/iter_001") if row["finish_reason"] == "failed"]
    assert failed
    for row in failed:
        assert row["environment_reward"] == -0.75
        assert row["turn_rewards"] == [0.0, -0.75]
        assert len(row["turn_ends"]) == 2
    run.run(SCORE)
    scores = run.rows("scores/iter_001")
    shares = [
        scored_row["reward_by_turn"]
        for row, scored_row in zip(run.rows("rollouts/iter_001"), scores, strict=True)
        if row["finish_reason"] == "failed"
    ]
    assert all(of_row == [0.0, -0.75] for of_row in shares)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rl": {"algorithm": "remax"}, "rollout": {"greedy_baseline": True}},
         "rl.algorithm remax learns from the reward of whole episodes.* or rloo"),
        ({"rl": {"algorithm": "reinforce_pp_baseline"}}, "rl.algorithm reinforce_pp_baseline"),
        ({"rl": {"algorithm": "best_of_n"}}, "rl.algorithm best_of_n"),
        ({"policy_update": {"objective": "gspo"}}, "objective gspo .* rl.turn_credit turn"),
        ({"rl": {"reward": "verifier"}}, "no reward in rl.reward or score.weights is of the kind"),
        ({"score": {"weights": {"game": 0.0, "verifier": 1.0}}}, "no turn would be paid"),
        ({"score": {"clip": 1.0}}, "score.clip changes .*rl.turn_credit turn.*clip to null"),
        ({"score": {"whiten": True}}, "score.whiten changes .*set whiten to false"),
        ({"rl": {"turn_discount": 1.5}}, "turn_discount"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_by_turn_are_refused(changes, reason):
    values = {
        "rl": {"algorithm": "rloo", "reward": "game", "turn_credit": "turn"},
        "rewards": {"game": {"kind": "environment"}},
        "rollout": {"environment": "guess", "max_turns": 1},
    }
    Params.model_validate(values)
    merged = {key: values.get(key, {}) | changes.get(key, {}) for key in {*values, *changes}}
    with pytest.raises(ValueError, match=reason):
        Params.model_validate(merged)


def test_rollouts_without_turns_are_refused(playing):
    run = playing()
    run.run(ROLLOUT)
    path = run.root / "artifacts/rollouts/iter_001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["turn_ends", "turn_rewards"]), path)
    with pytest.raises(StageError, match=r"rl\.turn_credit is turn, but prompt \w+, sample \d"):
        run.run(SCORE)


def test_a_long_observation_is_cut_in_ids_before_the_policy_sees_it(playing):
    cut = {"long_observation": "cut", "cut_marker": "++"}
    run = playing(environment="Talks", episodes=cut)
    metrics = run.run(ROLLOUT)
    expected = Decoder(run.root / "artifacts/policies/sft/model").ids("123++789")
    num_cut = 0
    for row in run.rows("rollouts/iter_001"):
        starts = [end + 1 for end in row["turn_ends"][:-1]]
        for start in starts:
            seen = row["response_ids"][start : start + 8]
            assert seen == expected
            assert row["loss_mask"][start : start + 9] == [0] * 8 + [1]
        num_cut += len(starts)
    assert metrics["observations_cut"] == num_cut > 0
    run.run(SCORE)
    assert run.run(UPDATE)["logprob_gap_max"] < 1e-4


def test_a_cut_keeps_head_tail_and_what_the_template_puts_around():
    turns = TurnTemplate([90, 91], [92], (), None, [50, 51])
    message = [90, 91, *range(1, 11), 92]
    assert turns.shortened(message, 10, same_message=False) == [
        90, 91, 1, 2, 3, 50, 51, 9, 10, 92
    ]  # fmt: skip
    assert turns.shortened(range(1, 11), 6, same_message=True) == [1, 2, 50, 51, 9, 10]
    assert turns.shortened(range(1, 11), 3, same_message=True) == [1, 50, 51]
    with pytest.raises(StageError, match=r"max_observation_tokens 5 leaves nothing .* 6 or more"):
        turns.check_room(5)
    turns.check_room(6)


def test_a_marker_that_cannot_be_said_is_refused(playing):
    run = playing(environment="Talks", episodes={"long_observation": "cut", "cut_marker": "…"})
    with pytest.raises(StageError, match=r"episodes\.cut_marker: .*no tokens for all of '…'"):
        run.run(ROLLOUT)
