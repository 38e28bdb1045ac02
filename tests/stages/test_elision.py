"""Episodes whose old observations are elided: what was read, what is learnt from, which bytes.

Against the segments that rollouts have stands a loop over turns which elides by hand. That a model
learns from these contexts, and as from one row, is for test_ppo_by_hand.py, test_loss_masks.py and
test_turn_credit.py, where loops read every token in its own context.
"""

import json
import shutil
from contextlib import suppress

import pytest
import torch

from stages import rollout
from stages.context import ShareDone, StageError, Stopped
from stages.contracts.catalog import bind
from stages.contracts.episodes import EpisodeParams
from stages.contracts.params import Params
from stages.data.batching import collate
from stages.data.segments import pieces_of
from stages.engines.forward.scalars import sequence_rewards
from stages.engines.models.folders import load_policy, load_scalar_model, pad_id
from stages.environments.elision import History, Observed
from stages.environments.turns import read_turns
from tests.stages.test_online import OVERLAP, AskedAt, contents
from tests.stages.test_ppo_by_hand import said_by

TALKS = '''
from stages.environments.environment import Environment, Observation


class Talks(Environment):
    """Says a lot, or little, of what was said to it; over after as many turns as the seed says."""

    stops = tuple("13579")

    def reset(self, row, seed):
        self.left, self.turn = 4 + seed % 5, 0

    def step(self, action):
        self.left, self.turn = self.left - 1, self.turn + 1
        text = "0246802468"[: 1 + (5 + 4 * self.turn + len(action)) % 10]
        return Observation(text, reward=0.1 * len(action), done=not self.left)


class Breaks(Talks):
    def step(self, action):
        if self.turn == 5:
            raise KeyError("no such tool")
        return super().step(action)
'''
KEEPS = '''
import json
from pathlib import Path

from openai import OpenAI

from stages.environments.chat_agent import ChatAgent


class Keeps(ChatAgent):
    """Says a lot to the policy, and writes down the ids that it is told."""

    stops = tuple("13579")

    def run(self, base_url, row, seed):
        client = OpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(4 + seed % 5):
            told = client.chat.completions.create(
                model="any", messages=messages, extra_body={"return_token_ids": True}
            )
            [choice] = told.choices
            kept = [told.prompt_token_ids, choice.token_ids, told.usage.prompt_tokens]
            with (Path(__file__).parent / "kept.jsonl").open("a") as file:
                file.write(json.dumps(kept) + "\\n")
            messages += [choice.message, {"role": "user", "content": "02468024"}]
        return 1.0
'''
ROLLOUT, SCORE, UPDATE = (f"{stage}@iter_001" for stage in ("rollout", "score", "policy_update"))
ELIDES = {
    "context_tokens": 34, "elide_to": 0.75, "elided_marker": "++", "turn_tokens": 4,
}  # fmt: skip


@pytest.fixture
def playing(copied):
    """A copy of the trained run, whose rollouts are long episodes."""

    def copy(name="run", environment="Talks", rl=None, episodes=None, rollout=None, **changes):
        rollout = {
            "environment": f"talks:{environment}", "max_turns": 9, "max_new_tokens": 24,
            "temperature": 1.5, "prompts": 6, "samples": 3, "batch_size": 4,
            "max_observation_tokens": 16, **(rollout or {}),
        }  # fmt: skip
        run = copied(
            name,
            rollout=rollout,
            rl={"reward": "game", "algorithm": "grpo", **(rl or {})},
            rewards={"game": {"kind": "environment"}},
            episodes={**ELIDES, **(episodes or {})},
            **changes,
        )
        for path in ("artifacts/rollouts", "jobs"):
            shutil.rmtree(run.root / path)
        (run.root / "environments/talks.py").write_text(TALKS)
        run.run("reward_source@game")
        return run

    return copy


def elided_by_hand(row, turns, params, max_new_tokens):
    """Where the contexts of a row had to become shorter, and what was read there; and how many
    observations were not, after a stop and as messages of their own."""
    ids, mask, prompt = row["response_ids"], row["loss_mask"], row["prompt_ids"]
    firsts = [at for at, own in enumerate(mask) if own and at and not mask[at - 1]]
    ends = row["turn_ends"]
    observed = []  # the first and the last place of each observation, and what may stand for it
    gone, segments = set(), []
    for end, first in zip(ends, firsts, strict=False):
        said_after_a_stop = ids[end] in turns.stop_ids
        instead = turns.observed(params.elided_marker, same_message=said_after_a_stop)
        observed.append((end + 1, first - 1, instead))

        def read(gone, upto=first, observed=tuple(observed)):
            context = list(prompt)
            for at in range(upto):
                of = next((n for n, (a, b, _) in enumerate(observed) if a <= at <= b), None)
                if of not in gone:
                    context.append(ids[at])
                elif at == observed[of][0]:
                    context += observed[of][2]
            return context

        turn = min(params.turn_tokens, max_new_tokens - sum(mask[:first]))
        if len(read(gone)) + turn <= params.context_tokens:
            continue
        now = set(gone)
        for number, (start, last, instead) in enumerate(observed[:-1]):
            if len(read(now)) + turn <= int(params.elide_to * params.context_tokens):
                break
            if last - start + 1 > len(instead):
                now.add(number)
        if now != gone:
            gone = now
            segments.append((first, read(gone)[len(prompt) :]))
    after_stops = sum(ids[ends[number]] in turns.stop_ids for number in gone)
    return segments, after_stops, len(gone) - after_stops


def test_the_oldest_observations_are_elided_as_by_hand(playing):
    run = playing()
    metrics = run.run(ROLLOUT)
    params = run.params.episodes
    folder = run.root / "artifacts/policies/sft/model"
    turns = read_turns(folder, "user", "13579")
    policy = load_policy(folder).eval()
    rows = run.rows("rollouts/iter_001")
    num_elided = [0, 0]
    for row in rows:
        segments, *by_kind = elided_by_hand(row, turns, params, 24)
        num_elided = [one + two for one, two in zip(num_elided, by_kind, strict=True)]
        assert row["segment_starts"] == [start for start, _ in segments]
        assert row["segment_histories"] == [history for _, history in segments]
        for piece in pieces_of(row):
            read = piece.row["prompt_ids"] + piece.row["response_ids"]
            assert len(read) <= params.context_tokens
        # The policy read this and nothing else: it would have found other log-probs.
        sampled = [x for x, own in zip(row["logprobs"], row["loss_mask"], strict=True) if own]
        with torch.no_grad():
            logprobs, _ = said_by(policy, row, temperature=1.5)
        assert sampled == pytest.approx([float(x) for x in logprobs], abs=1e-4)
    num_segments = [1 + len(row["segment_starts"]) for row in rows]
    assert max(num_segments) >= 3
    assert min(num_segments) == 1
    assert metrics["segments"] == pytest.approx(sum(num_segments) / len(rows))
    assert metrics["observations_elided"] == sum(num_elided)
    assert min(num_elided) > 0
    # The reference is the policy that sampled.
    assert run.run(SCORE)["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    learnt = run.run(UPDATE)
    assert learnt["logprob_gap_max"] < 1e-4
    assert learnt["num_responses"] == len(rows) == 18


@pytest.mark.parametrize("processes", [0, 1])
def test_an_agent_that_keeps_ids_is_told_what_the_policy_read(playing, processes):
    run = playing(rollout={"environment": "keeps:Keeps"}, episodes={"processes": processes})
    (run.root / "environments/keeps.py").write_text(KEEPS)
    run.run(ROLLOUT)
    read = set()
    for row in run.rows("rollouts/iter_001"):
        for piece in pieces_of(row):
            ids = piece.row["response_ids"]
            own = [*(bool(each) for each in piece.row["loss_mask"]), False]
            firsts = [at for at in range(len(ids)) if own[at] and not (at and own[at - 1])]
            for first in firsts:
                context = (*piece.row["prompt_ids"], *ids[:first])
                read.add((context, tuple(ids[first : own.index(False, first)])))
    lines = (run.root / "environments/kept.jsonl").read_text().splitlines()
    assert len(lines) > 18
    for context, ids, count in map(json.loads, lines):
        assert (tuple(context), tuple(ids)) in read
        assert count == len(context)
    assert any(row["segment_starts"] for row in run.rows("rollouts/iter_001"))


def test_an_episode_that_fits_is_what_it_is_without_elision(playing):
    short = {"max_turns": 3, "max_new_tokens": 8}
    fits = playing("fits", rollout=short, episodes={"context_tokens": 48})
    unset = {"context_tokens": None, "elide_to": 0.5, "elided_marker": ""}
    plain = playing("plain", rollout=short, episodes=unset)
    for run in (fits, plain):
        run.run(ROLLOUT)
    rows = plain.rows("rollouts/iter_001")
    assert max(len(row["turn_ends"]) for row in rows) == 3
    assert not any(name.startswith("segment") for name in rows[0])
    none = {"segment_starts": [], "segment_histories": []}
    assert fits.rows("rollouts/iter_001") == [row | none for row in rows]


def test_an_episode_ends_where_nothing_is_left_to_elide(playing):
    run = playing(episodes={"context_tokens": 22})
    run.run(ROLLOUT)
    full = [
        row
        for row in run.rows("rollouts/iter_001")
        if row["finish_reason"] == "length"
        and sum(row["loss_mask"]) < 24
        and len(row["turn_ends"]) < 9
        and row["response_ids"][-1] in read_turns(
            run.root / "artifacts/policies/sft/model", "user", "13579"
        ).stop_ids
    ]  # fmt: skip
    assert full
    for row in full:
        last = pieces_of(row)[-1].row
        assert len(last["prompt_ids"]) + len(last["response_ids"]) <= 22


def test_failed_and_dropped_episodes_are_counted_once(playing):
    run = playing(environment="Breaks", episodes={"failed": "drop"})
    metrics = run.run(ROLLOUT)
    rows = run.rows("rollouts/iter_001")
    assert max(len(row["segment_starts"]) for row in rows) >= 1
    assert metrics["episodes"] == 18 == len(rows) + metrics["episodes_dropped"]
    assert 0 < metrics["episodes_failed"] <= metrics["episodes_dropped"] < 18
    assert metrics["episodes_dropped"] % 3 == 0
    run.run(SCORE)
    assert run.run(UPDATE)["num_responses"] == len(rows)


def test_a_reward_model_reads_what_the_policy_read_last(playing):
    run = playing(rl={"reward": "reward_model"})
    run.run(ROLLOUT)
    run.run(SCORE)
    model = load_scalar_model(run.root / "artifacts/rewards/reward_model").eval()
    rows = run.rows("rollouts/iter_001")
    for row, scored in zip(rows, run.rows("scores/iter_001"), strict=True):
        starts, histories = [0, *row["segment_starts"]], [[], *row["segment_histories"]]
        last = histories[-1] + row["response_ids"][starts[-1] :]
        with torch.no_grad():
            reward = sequence_rewards(model, collate([row["prompt_ids"]], [last], pad_id(model)))
        assert dict(scored["by_source"])["reward_model"] == pytest.approx(float(reward), abs=1e-4)


def test_a_demonstration_has_none_of_a_responses_segments(playing):
    run = playing(
        rl={"algorithm": "dpo"},
        rollout={"source": "demonstrations"},
        policy_update={"chosen": "demonstrations"},
    )
    run.run(ROLLOUT)
    run.run(SCORE)
    assert any(row["segment_starts"] for row in run.rows("rollouts/iter_001"))
    metrics = run.run(UPDATE)
    assert metrics["num_pairs"] == 18
    assert metrics["logprob_gap_max"] < 1e-4


def test_an_evaluation_elides_as_rollouts_do(playing):
    metrics = playing().run("evaluate_sft")
    assert metrics["segments"] > 1
    assert metrics["observations_elided"] > 0
    assert metrics["kl_to_reference"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "credit"), [("ppo", "turn"), ("grpo", "episode"), ("dpo", "episode")]
)
def test_fused_steps_learn_what_chained_iterations_do(playing, algorithm, credit):
    rl = {
        "algorithm": algorithm,
        "turn_credit": credit,
        "iterations": {"fast_001": {"policy": "sft"}, "fast_002": {"policy": "fast_001"}},
        "online": {"fast": {"policy": "sft", "steps": 2}},
    }
    run = playing(rl=rl, policy_update={"learning_rate": 1e-3})
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
    assert any(row["segment_starts"] for row in run.rows("rollouts/fast"))


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
def test_stopped_time_and_again_the_bytes_are_the_same(playing, changes):
    rl = {"algorithm": "ppo", "online": {"fast": {"policy": "sft", "steps": 2}}}
    undisturbed, stopped = (playing(name, rl=rl, **changes) for name in ("undisturbed", "stopped"))
    undisturbed.run("online@fast")
    stops = 0
    for questions in range(5, 500, 9):
        ctx = stopped.context("online@fast", checkpoint_seconds=0.0, _stop=AskedAt(questions))
        try:
            stopped.run("online@fast", ctx)
            break
        except Stopped:
            stops += 1
    assert stops > 2
    assert contents(stopped) == contents(undisturbed)


def test_shards_and_a_replay_make_the_same_rollouts(playing):
    whole, cut, replayed = playing("whole"), playing("cut"), playing("replayed", "Breaks")
    whole.run(ROLLOUT)
    bound, (inputs, outs) = bind(ROLLOUT, cut.params), cut.paths(ROLLOUT)
    for path in outs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(ShareDone):
        rollout.run(bound.config, inputs, outs, cut.context(ROLLOUT, shard=1, num_shards=2))
    rollout.run(bound.config, inputs, outs, cut.context(ROLLOUT, shard=0, num_shards=2))
    made = [run.contents(run.root / "artifacts/rollouts") for run in (whole, cut)]
    assert made[0] == made[1]
    # The environment would fail, but nobody asks it.
    replays = replayed.params.rollout.model_copy(
        update={"tools": "replay", "environment": "talks:Talks"}
    )
    replayed.params = replayed.params.model_copy(update={"rollout": replays})
    talks = TALKS.replace("def step(self, action):\n", "def step(self, action):\n        1 / 0\n")
    (replayed.root / "environments/talks.py").write_text(talks)
    answers = whole.root / "artifacts/tool_answers/iter_001.parquet"
    shutil.copy(answers, replayed.root / "tool_answers")
    replayed.run(ROLLOUT)
    assert replayed.contents(replayed.root / "artifacts/rollouts") == made[0]


def test_a_history_keeps_what_the_policy_said_and_the_newest_observation():
    history = History([Observed(2, 6, [90]), Observed(7, 8, [90]), Observed(9, 14, [90])])
    ids = list(range(14))
    params = EpisodeParams(context_tokens=16, elide_to=0.5)
    history.shorten(ids, 16, params)
    assert (history.starts, history.read(ids)) == ([], ids)
    history.shorten(ids, 17, params)
    # The second is as short as its marker, so it stays, and nobody begins a segment for it.
    assert history.histories == [[0, 1, 90, *range(6, 14)]]
    assert history.starts == [14]
    history.shorten(ids, 30, params)
    assert history.starts == [14]
    assert history.read([*ids, 50]) == [0, 1, 90, *range(6, 14), 50]


def test_a_little_is_elided_where_a_little_is_enough():
    history = History([Observed(n * 5, n * 5 + 4, []) for n in range(5)])
    history.shorten(range(25), 25, EpisodeParams(context_tokens=24, elide_to=0.8))
    assert history.num_elided == 2  # 25 - 2 * 4 is at most 19
    assert history.histories == [[4, 9, *range(10, 25)]]


def test_a_prompt_without_room_is_refused(playing):
    run = playing(episodes={"context_tokens": 5})
    with pytest.raises(StageError, match=r"a prompt of \d+ tokens leaves no room .* 5: raise that"):
        run.run(ROLLOUT)


def test_an_elided_marker_that_cannot_be_said_is_refused(playing):
    run = playing(episodes={"elided_marker": "…"})
    with pytest.raises(StageError, match=r"episodes\.elided_marker: .*no tokens for all of '…'"):
        run.run(ROLLOUT)


def test_a_context_is_no_longer_than_the_models():
    with pytest.raises(ValueError, match=r"context_tokens 300 is more than model\.max_length 200"):
        Params.model_validate({"model": {"max_length": 200}, "episodes": {"context_tokens": 300}})


def test_long_episodes_are_allowed_where_they_are_elided():
    values = {
        "model": {"max_length": 200},
        "rollout": {"environment": "guess", "max_turns": 50, "max_observation_tokens": 20},
    }
    with pytest.raises(ValueError, match=r"set episodes\.context_tokens to have old observations"):
        Params.model_validate(values)
    Params.model_validate({**values, "episodes": {"context_tokens": 200}})
