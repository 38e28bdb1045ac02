"""Results of two iterations for the pages that show them: written by hand, recorded by DVC.

The first update was recorded twice, with different learning rates: the tag `first` has the slower
one. What models say in it would break every page that does not take text for text.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from stages.data import schema
from stages.data.artifacts import write_parquet
from stages.data.seeds import content_id
from stages.evaluation.answers import Answer, Answered
from tests.control.recorded_policies import Recorded
from tests.lineage.world import experience_row, rollout_row, score_row

GRAPH = """\
stages:
  sft:
    cmd: echo sft
    deps: [given.txt]
    params: [sft]
    outs: [artifacts/policies/sft/model]
  rollout:
    foreach: ${rl.iterations}
    do:
      cmd: echo ${key}
      deps: ["artifacts/policies/${item.policy}/model"]
      outs: ["artifacts/rollouts/${key}.parquet"]
  score:
    foreach: ${rl.iterations}
    do:
      cmd: echo ${key}
      deps: ["artifacts/rollouts/${key}.parquet"]
      outs: ["artifacts/scores/${key}.parquet"]
  policy_update:
    foreach: ${rl.iterations}
    do:
      cmd: echo ${key}
      deps:
        - artifacts/policies/${item.policy}/model
        - artifacts/rollouts/${key}.parquet
        - artifacts/scores/${key}.parquet
      params: [policy_update]
      outs:
        - artifacts/policies/${key}/model
        - artifacts/policies/${key}/experience.parquet
"""
HOSTILE = (
    '<script>document.title="owned"</script><img src="x" onerror="document.title=\'owned\'">'
    "\x1b[31mred\x1b[0m \u202eleft\u202c \u0634\u0643\u0631\u0627 `a` {{b}} &amp;"
)
SHOWN = HOSTILE.replace("\x1b", "␛").replace("\u202e", "\ufffd").replace("\u202c", "\ufffd")
SURROGATE = '{"note": "\\ud800"}'
NUM_PROMPTS = 60
EPISODE = "guess a number"
WORDS = ["<eos>", "1", "2", "+", "=", "higher", "lower", "?"]


def make_results(root: Path) -> Path:
    """A clone with all of it."""
    recorded = Recorded(root)
    (root / "dvc.yaml").write_text(GRAPH)
    recorded.params(1e-4, "iter_001", "iter_002")
    _policy(root, "sft", "a")
    _answers(recorded)
    _iteration(root, "iter_001", *_plain())
    _iteration(root, "iter_002", *_episodes())
    _policy(root, "iter_001", "slow")
    _policy(root, "iter_002", "c")
    recorded.record("first results", "first")
    recorded.params(1e-3, "iter_001", "iter_002")
    _policy(root, "iter_001", "fast")
    recorded.record("a faster policy")
    return root


def prompts() -> list[str]:
    """Those of the first iteration, in the order of its rows."""
    return sorted([HOSTILE, *(f"{number}+1=" for number in range(1, NUM_PROMPTS))], key=content_id)


def held_out() -> list[str]:
    """Those that were evaluated, in the order of their ids."""
    return sorted([HOSTILE, *(f"{number}*2=" for number in range(1, 30))], key=content_id)


def reward_of(number: int, index: int) -> float:
    """What the sample of a prompt was paid: a number for each row."""
    return number + index / 2


def _policy(root: Path, name: str, weights: str) -> None:
    model = root / "artifacts/policies" / name / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "weights").write_text(weights)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))


Tables = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]


def _plain() -> Tables:
    """Two samples of each prompt; the update used the first."""
    rollouts, scores, used = [], [], []
    for number, prompt in enumerate(prompts()):
        for index in range(2):
            said = HOSTILE if prompt == HOSTILE else f"answer {number} {index}"
            changes: dict[str, Any] = {"extra": SURROGATE}
            if index:
                changes |= {
                    "finish_reason": "length",
                    "response_ids": [1, 2, 3],
                    "logprobs": [-1.0] * 3,
                }
            rollouts.append(rollout_row(prompt, index, said, **changes))
            score = score_row(prompt, index, reward_of(number, index))
            scores.append({**score, "by_source": [("verifier", float(index)), ("length", -0.5)]})
        used.append(experience_row(prompt, 0, "policy_gradient", advantages=[1.5, -0.75]))
    return rollouts, scores, used


def _episodes() -> Tables:
    """One of two turns, which read a shortened context for the second."""
    row = rollout_row(
        EPISODE,
        0,
        "1 ? higher 2",
        response_ids=[1, 7, 5, 2, 0],
        logprobs=[-0.01, -3.0, 0.0, -0.5, -0.1],
        loss_mask=[1, 1, 0, 1, 1],
        environment_reward=1.0,
        turn_ends=[1, 4],
        turn_rewards=[0.25, 0.75],
        segment_starts=[3],
        segment_histories=[[5, 6]],
    )
    score = {**score_row(EPISODE, 0, 1.0), "ref_logprobs": [-0.01, -1.0, 0.0, -0.5, -0.1]}
    advantages = [0.5, -2.0, 0.0, 1.0, 1.0]
    used = experience_row(EPISODE, 0, "policy_gradient", advantages=advantages)
    return [row], [score], [used]


def _iteration(root: Path, name: str, rollouts: Any, scores: Any, used: Any) -> None:
    for folder in (f"artifacts/policies/{name}", "artifacts/rollouts", "artifacts/scores"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    write_parquet(root / f"artifacts/rollouts/{name}.parquet", rollouts, schema.RolloutRow)
    write_parquet(root / f"artifacts/scores/{name}.parquet", scores, schema.ScoreRow)
    path = root / f"artifacts/policies/{name}/experience.parquet"
    write_parquet(path, used, schema.ExperienceRow)


def _answers(recorded: Recorded) -> None:
    """30 held-out prompts: all wrong by SFT; the first five and the hostile one right later."""
    from stages.evaluation import folder

    asked = held_out()
    for policy in ("sft", "iter_001"):
        answers = []
        for number, prompt in enumerate(asked):
            right = policy == "iter_001" and (number < 5 or prompt == HOSTILE)
            said = HOSTILE if prompt == HOSTILE else f"{policy} says {number}"
            reward = (1.0 if right else 0.0) + number / 100
            greedy = Answer(said, "stop", 10 + number, reward, right)
            task = "odd" if number % 2 else "even"
            sampled = (Answer(f"{said}, sampled", "stop", 10, reward, right),)
            answers.append(Answered(content_id(prompt), prompt, "2", task, greedy, sampled))
        path = recorded.root / "artifacts/evaluations" / policy
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.write(path, answers, None, [])
