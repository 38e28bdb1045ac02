"""Episodes with an environment: ids, masks, seeds and rewards; what holds of any rollout, too."""

import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from stages import rollout
from stages.context import ShareDone, StageError, Stopped
from stages.contracts.catalog import bind
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.data.seeds import stable_hash
from stages.data.tokenizer import Decoder
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.sampling import sample_seed
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.processes import parts
from stages.engines.processes.parts import fill
from stages.environments import episodes
from stages.environments.calculator import Calculator, result
from stages.environments.environment import Observation
from stages.environments.episodes import longest_sequence, open_arena, play
from stages.environments.guess import Guess
from stages.environments.turns import around_observation, read_turns
from stages.rewards.named import NamedSource, named_pass
from tests.data.test_rendering import words_tokenizer
from tests.episodes import play_all
from tests.waiting import must_not_wait

ROLLOUT, SCORE, UPDATE = (f"{stage}@iter_001" for stage in ("rollout", "score", "policy_update"))
ECHO = '''
from stages.environments.environment import Environment, Observation


class Echo(Environment):
    """Says how long the turn was and who is asked; over after as many turns as the seed says."""

    stops = (";",)

    def reset(self, row, seed):
        assert row["prompt"].endswith("=")
        assert set(row) == {"prompt_id", "prompt", "answer", "extra"}
        self.left, self.name = 1 + seed % 4, str(seed % 100)

    def step(self, action):
        self.left -= 1
        text = f"{len(action) % 10}+{self.name}="
        return Observation(text, reward=0.25 * len(action), done=not self.left)


class Raises(Echo):
    def step(self, action):
        raise KeyError("no such tool")


class Hangs(Echo):
    def step(self, action):
        import time

        time.sleep(4000)


class Talks(Echo):
    def step(self, action):
        return Observation("1" * 9)


class Mumbles(Echo):
    def step(self, action):
        return "1"


class Infinite(Echo):
    def step(self, action):
        return Observation("1", reward=float("inf"))


class Foreign(Echo):
    def step(self, action):
        return Observation("hello")


class Stops(Echo):
    stops = ("==",)


class Forgets(Environment):
    def step(self, action):
        return Observation("1")


class Tutor:
    def reset(self, row, seed): ...
    def step(self, action): ...
'''
PLAYING = {
    "environment": "echo:Echo", "max_turns": 3, "max_new_tokens": 14, "temperature": 1.5,
    "prompts": 6, "samples": 3, "batch_size": 4, "max_observation_tokens": 8,
}  # fmt: skip


@pytest.fixture
def playing(copied):
    """A copy of the trained run, with an environment of the user's."""

    def copy(name="run", rollout=None, rl=None, **changes):
        rl = {"reward": "game", "algorithm": "grpo", **(rl or {})}
        changes = {"rl": rl, "rewards": {"game": {"kind": "environment"}}, **changes}
        run = copied(name, rollout={**PLAYING, **(rollout or {})}, **changes)
        for path in ("artifacts/rollouts", "jobs"):
            shutil.rmtree(run.root / path)
        (run.root / "environments/echo.py").write_text(ECHO)
        run.run("reward_source@game")
        return run

    return copy


def test_every_turn_is_what_the_policy_says_after_all_before_it(playing):
    """A hand-written loop, an episode at a time, without the code that plays them."""
    run = playing()
    metrics = run.run(ROLLOUT)
    policy = run.root / "artifacts/policies/sft/model"
    decoder = Decoder(policy)
    generator = TorchGenerator("cpu", Precision.FLOAT32, 1)
    generator.load(policy)
    module: dict = {}
    exec(ECHO, module)
    played = run.rows("rollouts/iter_001")
    eos, stop = decoder.vocabulary()["<eos>"], decoder.vocabulary()[";"]
    endings, all_turns = set(), []
    for row in played:
        seed = sample_seed(run.params.seed, "iter_001", row["prompt_id"], row["sample_index"])
        assert row["seed"] == seed
        environment = module["Echo"]()
        of_game = stable_hash(run.params.seed, "environment", row["prompt_id"])
        environment.reset(
            {name: row[name] for name in ("prompt_id", "prompt", "answer")} | {"extra": {}}, of_game
        )
        ids, mask, logprobs, paid, turn, reason = [], [], [], 0.0, 0, "length"
        ends, rewards = [], []
        while turn < 3 and sum(mask) < 14:
            turn_seed = stable_hash(seed, "turn", turn) if turn else seed
            (said,) = generator.generate(
                [Request([*row["prompt_ids"], *ids], turn_seed)],
                max_new_tokens=14 - sum(mask),
                sampling=Sampling(1.5, stop_ids=(stop,)),
            )
            turn += 1
            ids, mask = ids + said.ids, mask + [1] * len(said.ids)
            logprobs += said.logprobs
            ends, rewards = [*ends, len(ids) - 1], [*rewards, 0.0]
            endings.add(said.ids[-1] if said.ids[-1] in (eos, stop) else said.finish_reason)
            if said.finish_reason == "length":
                break
            seen = environment.step(decoder.text(said.ids))
            paid += seen.reward
            rewards[-1] = seen.reward
            if seen.done:
                reason = "stop"
                break
            if turn == 3 or sum(mask) == 14:
                break
            observed = decoder.ids(seen.text)
            ids, mask = ids + observed, mask + [0] * len(observed)
            logprobs += [0.0] * len(observed)
        assert row["response_ids"] == ids
        assert row["loss_mask"] == mask
        assert row["logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert all(x == 0.0 for x, said in zip(row["logprobs"], mask, strict=True) if not said)
        assert row["environment_reward"] == pytest.approx(paid)
        assert (row["turn_ends"], row["turn_rewards"]) == (ends, pytest.approx(rewards))
        assert all(mask[end] for end in row["turn_ends"])
        assert row["finish_reason"] == reason
        assert row["response"] == decoder.text(ids)
        all_turns.append(turn)
    assert endings == {eos, stop, "length"}
    assert set(all_turns) == {1, 2, 3}
    assert {row["finish_reason"] for row in played} == {"stop", "length"}
    assert metrics["turns"] == pytest.approx(sum(all_turns) / len(played))
    assert metrics["num_tokens"] == sum(sum(row["loss_mask"]) for row in played)
    assert metrics["response_length"] == metrics["num_tokens"] / len(played)
    assert metrics["environment_reward"] == pytest.approx(
        sum(row["environment_reward"] for row in played) / len(played)
    )


def test_an_episode_of_one_turn_is_the_response_without_an_environment(playing):
    """The same prompt, seed and budget give the same tokens, to the bit."""
    alone = playing("alone", {"environment": None}, {"reward": "verifier"})
    game = playing("game", {"max_turns": 1})
    alone.run(ROLLOUT)
    game.run(ROLLOUT)
    first, second = (run.rows("rollouts/iter_001") for run in (alone, game))
    stop = Decoder(game.root / "artifacts/policies/sft/model").vocabulary()[";"]
    for plain, played in zip(first, second, strict=True):
        assert plain["loss_mask"] is None
        assert plain["environment_reward"] is None
        assert plain.keys() == played.keys() - {"turn_ends", "turn_rewards"}
        ids = plain["response_ids"]
        length = 1 + ids.index(stop) if stop in ids else len(ids)
        assert played["response_ids"] == ids[:length]
        assert played["loss_mask"] == [1] * length
        assert played["logprobs"] == pytest.approx(plain["logprobs"][:length], abs=1e-5)


def test_an_episode_does_not_depend_on_its_neighbours(playing):
    few, many = playing("few", {"batch_size": 1}), playing("many", {"batch_size": 32})
    for run in (few, many):
        run.run(ROLLOUT)
    for one, other in zip(*(run.rows("rollouts/iter_001") for run in (few, many)), strict=True):
        for name in ("response_ids", "loss_mask", "finish_reason", "environment_reward"):
            assert one[name] == other[name]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def test_the_bytes_do_not_depend_on_shards_or_stops(playing):
    whole, cut = playing("whole"), playing("cut")
    whole.run(ROLLOUT)
    expected = whole.contents(whole.root / "artifacts/rollouts")
    bound, (inputs, outs) = bind(ROLLOUT, cut.params), cut.paths(ROLLOUT)
    outs["rollouts"].parent.mkdir()
    stopping = cut.context(ROLLOUT)
    stopping.request_stop()
    with pytest.raises(Stopped):
        rollout.run(bound.config, inputs, outs, stopping)
    with pytest.raises(ShareDone):
        rollout.run(bound.config, inputs, outs, cut.context(ROLLOUT, shard=1, num_shards=2))
    rollout.run(bound.config, inputs, outs, cut.context(ROLLOUT, shard=0, num_shards=2))
    assert cut.contents(cut.root / "artifacts/rollouts") == expected


def test_a_killed_rollout_plays_only_the_episodes_that_are_left(playing, monkeypatch):
    whole, cut = playing("whole"), playing("cut")
    whole.run(ROLLOUT)
    monkeypatch.setattr(parts, "_keep", dies_at(3, parts._keep))
    with pytest.raises(RuntimeError, match="killed"):
        cut.run(ROLLOUT)
    monkeypatch.undo()
    kept = [path.name.split("-") for path in (cut.context(ROLLOUT).scratch).rglob("0*.json")]
    assert len(kept) == 2
    begun = []
    monkeypatch.setattr(
        episodes,
        "play",
        lambda arena, rows, *rest, **how: begun.extend(rows) or play(arena, rows, *rest, **how),
    )
    cut.run(ROLLOUT)
    assert len(begun) == 18 - sum(int(stop[:8]) - int(start) for start, stop in kept)
    assert cut.contents(cut.root / "artifacts/rollouts") == whole.contents(
        whole.root / "artifacts/rollouts"
    )


def dies_at(number, keep):
    count = []

    def dying(*arguments):
        count.append(1)
        if len(count) == number:
            raise RuntimeError("killed")
        keep(*arguments)

    return dying


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dpo"])
def test_what_was_sampled_is_what_is_trained_on(playing, algorithm):
    """Trainer and reference say of the policy's own tokens what the sampler said."""
    run = playing(rl={"algorithm": algorithm}, policy_update={"epochs": 1},
                  score={"missing_eos_penalty": 0.0})  # fmt: skip
    run.run(ROLLOUT)
    of_score = run.run(SCORE)
    metrics = run.run(UPDATE)
    played = run.rows("rollouts/iter_001")
    assert metrics["logprob_gap_max"] < 1e-4
    assert abs(of_score["kl_to_reference"]) < 1e-6
    assert metrics["response_length"] == sum(sum(row["loss_mask"]) for row in played) / len(played)
    for score, row in zip(run.rows("scores/iter_001"), played, strict=True):
        assert score["ref_logprobs"] == pytest.approx(row["logprobs"], abs=1e-4)
        assert score["reward"] == row["environment_reward"]
        assert score["by_source"] == [("game", row["environment_reward"])]


def test_supports_of_cut_off_sampling_go_with_the_tokens(playing):
    run = playing(rollout={"top_k": 4})
    run.run(ROLLOUT)
    run.run(SCORE)
    for row in run.rows("rollouts/iter_001"):
        assert [len(kept) > 0 for kept in row["support"]] == [bool(m) for m in row["loss_mask"]]
    assert run.run(UPDATE)["logprob_gap_max"] < 1e-4


def test_fused_steps_play_what_chained_iterations_play(playing):
    names = ["fast_001", "fast_002"]
    rl = {
        "algorithm": "ppo",
        "iterations": {"fast_001": {"policy": "sft"}, "fast_002": {"policy": "fast_001"}},
        "online": {"fast": {"policy": "sft", "steps": 2}},
    }  # fmt: skip
    run = playing(rl=rl)
    run.run_iterations(*names)
    run.run("online@fast")
    last = run.root / "artifacts/policies" / names[-1] / "model"
    assert run.contents(last.parents[1] / "fast/model") == run.contents(last)
    together = run.rows("rollouts/fast")
    for step, name in enumerate(names, 1):
        alone = run.rows(f"rollouts/{name}")
        assert any(0 in row["loss_mask"] for row in alone)
        assert [row for row in together if row["step"] == step] == [
            {"step": step, **row} for row in alone
        ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("echo:Raises", r"KeyError: 'no such tool'"),
        ("echo:Talks", r"9 tokens, more than rollout.max_observation_tokens 8"),
        ("echo:Mumbles", r"answered with str, not with an Observation"),
        ("echo:Infinite", r"reward is inf"),
        ("echo:Foreign", r"no tokens for all of 'hello'"),
        ("echo:Forgets", r"abstract .*reset"),
    ],
)
def test_an_environment_that_fails_is_named_with_the_row(playing, name, problem):
    run = playing(rollout={"environment": name})
    with pytest.raises(StageError, match=rf"environment {name} failed at .*prompt \w+.*{problem}"):
        run.run(ROLLOUT)


@must_not_wait
def test_an_environment_that_hangs_is_given_up(playing):
    run = playing(rollout={"environment": "echo:Hangs"}, episodes={"answer_timeout": 0.2})
    with pytest.raises(StageError, match=r"prompt \w+, sample \d.*answer_timeout 0.2 seconds"):
        run.run(ROLLOUT)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("chess", "'chess'; there are calculator, guess"),
        ("chess:Board", r"no .*environments/chess.py: put the module there"),
        ("echo:Missing", "no class Missing"),
        ("echo:Tutor", "no class Tutor that is an Environment"),
        ("echo:Stops", "stops turns at '=='.*not one token"),
        ("broken:Any", "does not import: SyntaxError"),
        ("exits:Any", "does not import: SystemExit: no licence"),
    ],
)
def test_an_environment_that_is_not_there_is_refused(playing, name, problem):
    run = playing(rollout={"environment": name})
    files = {"broken.py": "class Any(:\n", "exits.py": "raise SystemExit('no licence')\n"}
    for file, text in files.items():
        (run.root / "environments" / file).write_text(text)
    with pytest.raises(StageError, match=problem):
        run.run(ROLLOUT)
    # The folder is an input: reading from it adds nothing to it.
    assert {path.name for path in (run.root / "environments").iterdir()} == {"echo.py", *files}


def test_episodes_that_cannot_fit_are_refused_beforehand():
    values = {"rollout": {"environment": "guess", "max_turns": 4, "max_observation_tokens": 8,
                          "max_new_tokens": 24}}  # fmt: skip
    with pytest.raises(ValueError, match=r"max_turns 4.*model.max_length 48"):
        Params.model_validate(values)
    Params.model_validate({"rollout": {**values["rollout"], "max_turns": 2}})


def test_a_reward_that_no_environment_pays_is_refused(playing):
    rewards = {"game": {"kind": "environment"}}
    with pytest.raises(ValueError, match=r"rewards.game .*rollout.environment is null"):
        Params.model_validate({"rewards": rewards, "rl": {"reward": "game"}})
    run = playing(rollout={"environment": None}, rl={"reward": "verifier"})
    run.run(ROLLOUT)
    source = NamedSource("game", run.params.rewards["game"], run.root / "rewards")
    work = named_pass(run.context(SCORE), "rewards", source, run.rows("rollouts/iter_001"))
    with pytest.raises(StageError, match=r"rewards.game: no environment has paid for prompt \w+"):
        fill(run.context(SCORE), work)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (
    "<bos>{% for m in messages %}{% if m['role'] == 'user' %}[I] {{ m['content'] }} [/I]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }} <eos>"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
UNENDED = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
FORGETFUL = "{% for m in messages[-2:] %}{{ m['content'] }}<eos>{% endfor %}"
SHOUTED = "{% for m in messages %}{{ m['content'] | upper }}<eos>{% endfor %}"


def tokenizer_of(trained, template):
    tokenizer = AutoTokenizer.from_pretrained(trained.root / "artifacts/policies/sft/model")
    if template:
        tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "role", "expected"),
    [
        (None, "user", ("", "")),
        (CHATML, "user", ("\n<|im_start|>user\n", "<eos>\n<|im_start|>assistant\n")),
        (CHATML, "tool", ("\n<|im_start|>tool\n", "<eos>\n<|im_start|>assistant\n")),
        (BRACKETS, "user", ("[I] ", " [/I]")),
    ],
)
def test_what_surrounds_an_observation_is_read_off_the_template(trained, template, role, expected):
    assert around_observation(tokenizer_of(trained, template), role) == expected


@pytest.mark.parametrize(
    ("template", "role", "problem"),
    [
        (BRACKETS, "tool", "does not render a dialogue with the role 'tool'"),
        (UNENDED, "user", "does not end an assistant's turn with the end token"),
        (FORGETFUL, "user", "writes earlier turns differently"),
        (SHOUTED, "user", "does not show what an assistant and the role 'user' say"),
    ],
)
def test_a_template_that_allows_no_turns_is_refused(trained, template, role, problem):
    with pytest.raises(StageError, match=problem):
        around_observation(tokenizer_of(trained, template), role)


def test_an_observation_is_wrapped_after_an_end_token_and_not_after_a_stop(trained, tmp_path):
    tokenizer = tokenizer_of(trained, CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(list("usera\nint"))
    tokenizer.save_pretrained(tmp_path)
    turns = read_turns(tmp_path, "user", (";",))
    whole = turns.observed("12", same_message=False)
    assert Decoder(tmp_path)._tokenizer.decode(whole, skip_special_tokens=False) == (
        "\n<|im_start|>user\n12<eos>\n<|im_start|>assistant\n"
    )
    assert turns.observed("12", same_message=True) == Decoder(tmp_path).ids("12")
    (stop,) = turns.stop_ids
    assert stop == Decoder(tmp_path).vocabulary()[";"]


@pytest.mark.parametrize("swallows", [True, False])
@pytest.mark.parametrize("prepends", ["first", "always", "never", "by normalising"])
def test_an_observation_has_the_ids_that_it_has_in_the_whole(tmp_path, swallows, prepends):
    """Also where a tokenizer puts a space before the first word of a text."""
    made = words_tokenizer(swallows, prepends)
    made.save_pretrained(tmp_path)
    said = [("user", "a"), ("assistant", " b"), ("user", "cd")]
    messages = [{"role": role, "content": text} for role, text in said]
    text = made.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    whole = made(text, add_special_tokens=False)["input_ids"]
    ends = [place for place, token in enumerate(whole) if token == made.eos_token_id]
    turns = read_turns(tmp_path, "user", ())
    assert turns.observed("cd", same_message=False) == whole[ends[1] + 1 :]
    assert turns.observed("cd", same_message=True) == made.convert_tokens_to_ids(["c", "d"])


def test_what_looks_like_a_special_token_in_an_observation_is_text(trained):
    folder = trained.root / "artifacts/policies/sft/model"
    turns = read_turns(folder, "user", ())
    end = Decoder(folder).vocabulary()["<eos>"]
    assert Decoder(folder).ids("1<eos>2")[1] == end
    with pytest.raises(ValueError, match="no tokens for all of '1<eos>2'"):
        turns.observed("1<eos>2", same_message=True)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("12+34", "46"), ("2*(3+4)-5", "9"), ("7/2", "3.5"), ("1/3", "0.333333333333"),
        ("-4*-2", "8"), ("0.1+0.2", "0.3"), (" 6 / 3 ", "2"), ("100000/3", "33333.3333333"),
        ("-2/3", "-0.666666666667"), ("999999999999", "999999999999"), ("-1/9999999999999", "0"),
    ],
)  # fmt: skip
def test_the_calculator_computes(expression, expected):
    assert result(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "", "1/0", "2**99999", "x", "__import__('os')", "1" * 300, "1,2", "1+", "1j",
        "1e400/3", "1e999999999", "9" + "*9999999" * 20, "999999999999+1",
    ],
)  # fmt: skip
def test_the_calculator_answers_nonsense_with_error(expression):
    game = Calculator()
    game.reset({"answer": "1"}, 0)
    assert game.step(f"calc({expression})") == Observation("error")


def test_the_calculator_pays_for_the_right_answer():
    for said, paid in (("46", 1.0), (" 46 ", 1.0), ("47", 0.0), ("", 0.0)):
        game = Calculator()
        game.reset({"answer": "46"}, 0)
        assert game.step("calc(12+34)") == Observation("46")
        assert game.step(said) == Observation(reward=paid, done=True)


def test_a_number_is_found_by_halving():
    found = set()
    for seed in range(60):
        game = Guess()
        game.reset({}, seed)
        low, high = 1, 7
        for _ in range(3):
            guess = (low + high) // 2
            seen = game.step(str(guess))
            if seen.done:
                break
            low, high = (low, guess - 1) if seen.text == "<" else (guess + 1, high)
        assert seen == Observation(reward=1.0, done=True)
        found.add(guess)
    assert found == set(range(1, 8))
    assert game.step("none") == Observation(done=True)


def test_the_game_is_the_same_for_all_samples_of_a_prompt(playing):
    """Rewards of one prompt's samples are comparable: they are asked for the same number."""
    run = playing(rollout={"environment": "guess", "samples": 8, "max_turns": 1})
    run.run(ROLLOUT)
    numbers = {}
    for row in run.rows("rollouts/iter_001"):
        if row["environment_reward"] == 1.0:
            numbers.setdefault(row["prompt_id"], set()).add(
                [c for c in row["response"] if c.isdigit()][-1]
            )
    assert numbers
    assert all(len(of) == 1 for of in numbers.values())


def test_a_policy_is_evaluated_in_its_environment(playing):
    """What the environment pays says what is right, and a game is the one of the rollouts."""
    evaluate = {"correct": "game", "correct_at": 1.5, "samples": 2, "pass_at": [1, 2]}
    run = playing(evaluate=evaluate)
    metrics = run.run("evaluate_sft")
    shown = run.rows("evaluations/sft/samples")
    assert {row["correct"] for row in shown} == {True, False}
    assert all(row["correct"] is (row["reward"] >= 1.5) for row in shown)
    assert metrics["environment_reward"] == pytest.approx(metrics["reward_mean"])
    assert 1 < metrics["turns"] <= 3
    assert metrics["num_judged"] == metrics["num_prompts"] == len(shown)
    # The reference is the policy itself.
    assert metrics["kl_to_reference"] < 1e-6


def test_an_evaluated_episode_is_shown_turn_by_turn(playing):
    """What was said and answered is what the record of the environment has."""
    run = playing(evaluate={"correct": "game", "samples": 2, "pass_at": [1, 2]})
    metrics = run.run("evaluate_sft")
    told = {}
    for row in run.rows("tool_answers/evaluations/sft"):
        key = row["prompt_id"], row["sample_index"]
        if row["turn"]:
            said = ["assistant: " + row["action"].strip(), "environment: " + row["text"]]
            told.setdefault(key, []).extend(said[: 1 if row["done"] else 2])
    shown = [{**row, "sample_index": None} for row in run.rows("evaluations/sft/samples")]
    several = 0
    for row in [*shown, *run.rows("evaluations/sft/sampled")]:
        turns = told.get((row["prompt_id"], row["sample_index"]), [])
        num_turns = row["response"].count("assistant: ")
        if row["finish_reason"] == "stop" and len(turns) > 1:
            assert row["response"] == "\n\n".join(turns)
        elif num_turns:
            # The last turn was cut, or is the last that there may be.
            assert num_turns > 1
            assert row["response"].startswith("\n\n".join(turns[: 2 * num_turns - 2]))
        elif turns:
            assert row["response"].strip() == turns[0].removeprefix("assistant: ")
        several += num_turns > 1
    assert several > 5
    assert 0 < metrics["multi_turn_rate"] <= 1


@contextmanager
def arena_of(run):
    """The policy's folder, where it plays, and the rows that it is asked for."""
    policy, params = run.root / "artifacts/policies/sft/model", run.params
    playing = (params.rollout, params.episodes, run.root / "environments", policy)
    with open_arena(*playing, params.seed) as arena:
        yield policy, arena, [{**row, "sample_index": 0} for row in run.rows("data/prompts")]


def test_the_template_stands_around_what_follows_an_end_token_alone(playing):
    run = playing(rollout={"max_observation_tokens": 9})
    with arena_of(run) as (policy, arena, asked):
        before, after = arena.decoder.ids("++"), arena.decoder.ids("==")
        arena = replace(arena, turns=replace(arena.turns, before=before, after=after))
        generator = TorchGenerator("cpu", Precision.FLOAT32, 64)
        generator.load(policy)
        requests = [Request(row["prompt_ids"], seed) for seed, row in enumerate(asked)]
        episodes = play_all(arena, generator, asked, requests, 14, Sampling(1.5))
    endings = set()
    for episode in episodes:
        for at in range(1, len(episode.ids)):
            if (episode.loss_mask[at - 1], episode.loss_mask[at]) != (1, 0):
                continue
            until = next(i for i in range(at, len(episode.ids)) if episode.loss_mask[i])
            seen = episode.ids[at:until]
            wrapped = (seen[:2], seen[-2:]) == (before, after)
            assert wrapped is (episode.ids[at - 1] not in arena.turns.stop_ids)
            endings.add(wrapped)
    assert endings == {True, False}


class Terse:
    """Says one token a turn, and remembers how long a sequence could have become."""

    def __init__(self, token):
        self.token, self.longest = token, 0

    def generate(self, requests, *, max_new_tokens, **_):
        sizes = [len(each.prompt_ids) + each.limit(max_new_tokens) for each in requests]
        self.longest = max(self.longest, *sizes)
        return [Completion([self.token], [0.0], 0.0, "stop") for _ in requests]


def test_no_sequence_is_longer_than_was_said_before_any_began(playing):
    run = playing(rollout={"environment": "echo:Talks", "max_observation_tokens": 9})
    with arena_of(run) as (_, arena, asked):
        requests = [Request(row["prompt_ids"], seed=1) for row in asked]
        generator = Terse(arena.decoder.vocabulary()[";"])
        episodes = play_all(arena, generator, asked, requests, 14, Sampling())
    assert {episode.turns for episode in episodes} == {3}
    assert generator.longest == longest_sequence(asked, 14, arena)
    longest_prompt = max(len(row["prompt_ids"]) for row in asked)
    assert longest_sequence(asked, 14, None) == longest_prompt + 14
