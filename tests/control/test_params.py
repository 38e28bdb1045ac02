"""params.yaml is strict: mistakes are named by file, line and key."""

import typing
from pathlib import Path

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from pipelines.base.errors import LockstepError
from pipelines.config.params import load_params
from pipelines.config.reference import descriptions
from pipelines.config.strict_yaml import load_yaml
from stages.contracts.params import Params
from stages.contracts.rewards import AnySource

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    (folder / "params.yaml").write_text(text)
    return folder


def refused(folder: Path, text: str) -> str:
    with pytest.raises(LockstepError) as caught:
        load_params(write(folder, text))
    return str(caught.value)


def test_shipped_params_say_every_key_and_equal_the_defaults() -> None:
    assert load_params(ROOT) == Params()
    written = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    assert written == Params().model_dump(mode="json")


def test_exponents_are_numbers(tmp_path: Path) -> None:
    params = load_params(write(tmp_path, "sft:\n  learning_rate: 1e-3\n"))
    assert params.sft.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("prepare.folder", "", "is empty"),
        ("rl.teacher", " ", "is empty"),
        ("prepare.folder", ".", "contains the results in artifacts/"),
        ("prepare.folder", "data/../..", "contains the results in artifacts/"),
        ("score.folder", "metrics", "contains the results in metrics/"),
        ("model.folder", "artifacts/policies/sft/model", "computed after prepare"),
    ],
)
def test_a_path_that_nothing_can_depend_on_is_refused(
    tmp_path: Path, key: str, value: str, reason: str
) -> None:
    section, name = key.split(".")
    said = refused(tmp_path, f"seed: 1\n{section}:\n  {name}: '{value}'\n")
    assert f"params.yaml:3: `{key}` is " in said
    assert reason in said


def test_a_path_outside_and_one_of_an_earlier_stage_are_taken(tmp_path: Path) -> None:
    text = "prepare: {folder: ../data}\nrl: {teacher: artifacts/base}\n"
    assert load_params(write(tmp_path, text)).rl.teacher == "artifacts/base"
    said = refused(tmp_path, f"prepare: {{folder: '{tmp_path}'}}\n")
    assert "which contains the results in artifacts/" in said


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"params\.yaml: no such file"):
        load_params(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rl: {algorithm: grpo}\nrollout: {samples: 1}\n", "rollout.samples is 1"),
        ("rollout: {max_new_tokens: 99}\n", "leaves no room for a prompt"),
        ("rollout: {prompts: 99999}\n", "more than the"),
        ("model: {num_heads: 3}\n", "not a multiple of num_heads"),
        ("rl: {iterations: {iter_001: {policy: iter_007}}}\n", "neither 'sft' nor a policy above"),
        ("rl: {preferences: {dpo: {policy: iter_001}}}\n", "neither 'sft' nor a policy above"),
        ("rl: {preferences: {iter_001: {policy: sft}}}\n", "a policy called 'iter_001' already"),
        ("rl: {preferences: {1: {policy: sft}}}\n", "silently drop it"),
        ("rl: {iterations: {sft: {policy: sft}}}\n", "another name"),
        ("rl: {algorithm: rloo}\nrollout: {samples: 1}\n", "compares the responses to one prompt"),
        ("rl: {algorithm: dpo}\nrollout: {samples: 1}\n", "compares the responses to one prompt"),
        ("rl: {algorithm: remax}\n", "set rollout.greedy_baseline to true"),
        ("rollout: {reserve: 8}\n", "ppo compares no groups"),
        ("rl: {algorithm: rloo}\npolicy_update: {leave_one_out: true}\n", "does not read it"),
        ("policy_update: {keep_best: 2}\n", "ppo does not read it: set it back to 1"),
        ("rl: {algorithm: dpo}\npolicy_update: {mismatch: token_mask}\n", "set it back to none"),
        ("rollout: {greedy_baseline: true}\n", "only rl.algorithm remax"),
        ("rl: {turn_discount: 0.9}\n", "rl.turn_discount is 0.9, but rl.turn_credit episode"),
        ("rl: {turn_credit: turn}\n", "without rollout.environment there are no turns"),
        ("episodes: {cut_marker: ...}\n", "is not read, since long_observation is fail"),
        ("episodes: {elided_marker: ...}\n", 'set that, or elided_marker to ""'),
        ("episodes: {elide_to: 0.7}\n", "is not read, since context_tokens is null"),
        (
            "rl: {algorithm: reinforce_pp}\npolicy_update: {whiten_advantages: false}\n",
            "defined by its whitening",
        ),
        ("rl: {algorithm: reinforce_pp}\npolicy_update: {objective: gspo}\n", "for each token"),
        ("policy_update: {clip_high: .inf}\n", "finite number"),
        ("score: {weights: {verifier: 0.0}}\n", "are all 0"),
        ("rl: {algorithm: best_of_n}\npolicy_update: {keep_best: 4}\n", "rejects nothing"),
        ("rl: {algorithm: grpo}\npolicy_update: {critic: reward_model}\n", "grpo has no critic"),
        ("policy_update: {critic: none}\n", "whose advantages come from a critic"),
        (
            "rl: {reward: verifier}\npolicy_update: {critic: reward_model}\n",
            "no reward model is trained",
        ),
        ("policy_update: {objective: gspo}\n", "one ratio per response"),
        ("policy_update: {objective: gradient}\n", "set epochs to 1"),
        ("policy_update: {objective: gradient, epochs: 1, dual_clip: 3.0}\n", "dual_clip belongs"),
        ("policy_update: {clip_low: 1.0}\n", "no bound for a ratio"),
        ("policy_update: {kl_in: loss}\n", "k1 in the loss pulls nowhere"),
        ("policy_update: {kl_estimator: k3_unbiased}\n", "a reward has none"),
        ("policy_update: {kl_target: 1.0, kl_coef: 0.0}\n", "kl_target needs a kl_coef"),
        ("policy_update: {mismatch_floor: 3.0}\n", "less than or equal to 1"),
        ("policy_update: {mismatch_cap: 0.5}\n", "greater than or equal to 1"),
        ("policy_update: {schedule: linear}\n", "needs decay_steps above warmup_steps"),
        (
            "rl: {algorithm: dpo}\npolicy_update: {kl_in: loss, kl_estimator: k3}\n",
            "dpo does not read it: set it back to reward",
        ),
        ("rl: {algorithm: distill}\nrollout: {top_p: 0.9}\n", "over the whole vocabulary"),
        ("rl: {algorithm: dpo}\nrollout: {top_k: 5}\n", "over the whole vocabulary"),
        ("rl: {algorithm: dpo}\npolicy_update: {dpo_loss: kto}\n", "kto takes none"),
        ("rl: {algorithm: dpo}\npolicy_update: {dpo_margin: 0.5}\n", "only simpo has"),
        ("policy_update: {dpo_beta: 0.5}\n", "ppo does not read it: set it back to 0.1"),
        (
            "rl: {algorithm: dpo}\npolicy_update: {chosen: demonstrations}\n",
            "set rollout.source to demonstrations",
        ),
        (
            "rl: {algorithm: dpo}\nrollout: {source: demonstrations}\n"
            "policy_update: {chosen: demonstrations, dpo_reference: sft}\n",
            "set policy_update.dpo_reference to previous",
        ),
        ("score: {weights: {judge: 1.0}}\n", "the sources are reward_model and verifier"),
        (
            "rewards: {right: {kind: maths}}\nscore: {weights: {judge: 1.0}}\n",
            "the sources are reward_model, verifier and right",
        ),
        ("rl: {reward: verifer}\n", "did you mean 'verifier'?"),
        ("rl: {reward: judge}\n", "there are reward_model, verifier"),
        (
            "rl: {reward: right}\nrewards: {right: {kind: maths}}\n"
            "policy_update: {critic: reward_model}\n",
            "no reward model is trained",
        ),
        (
            "rl: {reward: right}\nrewards: {right: {kind: maths}}\n"
            "score: {weights: {reward_model: 1.0}}\n",
            "with rl.reward right the sources are right and verifier",
        ),
        ("rewards: {verifier: {kind: maths}}\n", "a source called 'verifier' already"),
        ("rewards: {a-b: {kind: maths}}\n", "call it right, short, judge"),
        ("rewards: {x: {kind: pattern, pattern: '('}}\n", "not a regular expression"),
        ("rewards: {x: {kind: function, function: score}}\n", "write module:function"),
        ("rewards: {x: {kind: length, target: 0}}\n", "needs a width"),
        ("rewards: {x: {kind: json_schema}}\n", "either a `definition` or a `file`"),
        ("rewards: {x: {kind: http, url: 'ftp://a'}}\n", "http:// or https://"),
        ("rewards: {x: {kind: http, url: 'http://me:pw@a'}}\n", "would be in git"),
        (
            "rewards: {x: {kind: http, url: 'http://a', token_variable: 'a-b c'}}\n",
            "token itself must not be in params.yaml",
        ),
        (
            "rewards: {x: {kind: judge, url: 'http://a', model: m, template: 'Good?'}}\n",
            "no {response}",
        ),
        ("score: {overlong_buffer: 28}\n", "leaves nothing of rollout.max_new_tokens"),
        ("preference: {loss: ipo, label_smoothing: 0.1}\n", "has no such term"),
        ("preference: {margin: 0.5}\n", "only simpo has"),
        ("preference: {loss: orpo, nll_coef: 1.0}\n", "has it already"),
        ("preference: {loss: kto, nll_coef: 1.0}\n", "has no chosen response"),
        ("rl: {iterations: {0008: {policy: sft}}}\n", "silently drop it"),
        ("rl: {iterations: {}}\n", "iterations is empty"),
        (f"rl: {{iterations: {{{'i' * 300}: {{policy: sft}}}}}}\n", "has 300 characters"),
        (f"rewards: {{{'r' * 300}: {{kind: maths}}}}\n", "has 300 characters"),
        ("prepare: {digits: 1, held_out: 50}\n", "too few"),
        (
            "evaluate: {samples: 3}\n",
            "evaluate.pass_at has 4, but evaluate.samples is 3, and pass@k needs at least k",
        ),
        (
            "evaluate: {correct: verifyer}\n",
            "evaluate.correct names 'verifyer', which is not a source of rewards: did you mean",
        ),
        ("evaluate: {pass_at: [0]}\n", "greater than or equal to 1"),
    ],
)
def test_contradictions_are_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "seed: 1\nsft:\n  lerning_rate: 0.1\n",
            "params.yaml:3: unknown key `sft.lerning_rate`; did you mean `sft.learning_rate`?",
        ),
        ("algorithm: grpo\n", "did you mean `rl.algorithm`?"),
        ("sft:\n  epochs: three\n", "params.yaml:2: `sft.epochs` is 'three' (str)"),
        ("sft:\n  learning_rate: '0.1'\n", "params.yaml:2: `sft.learning_rate` is '0.1' (str)"),
        ("rl:\n  algorithm: pop\n", "'ppo', 'grpo', 'rloo'"),
        ("rl:\n  algorithm: pop\n", "or 'distill'"),
        ("seed: 1\nseed: 2\n", "duplicate key"),
        ("seed: [1\n", "params.yaml"),
        (f"seed: {'[' * 500}{']' * 500}\n", "params.yaml: not readable"),
        (
            "rewards:\n  right:\n    kind: maths\n    timout: 3\n",
            "params.yaml:4: unknown key `rewards.right.timout`; did you mean "
            "`rewards.right.timeout`?",
        ),
        (
            "rewards:\n  short:\n    kind: length\n",
            "key `rewards.short.target` is missing; add it",
        ),
        (
            "rewards:\n  short:\n    kind: length\n    target: many\n",
            "params.yaml:4: `rewards.short.target` is 'many' (str)",
        ),
        (
            "rewards:\n  right:\n    kind: math\n",
            "params.yaml:2: `rewards.right.kind` is 'math'; did you mean 'maths'? known: maths, "
            "multiple_choice",
        ),
        ("rewards:\n  right: {}\n", "`rewards.right` has no `kind`; add one of maths, "),
        ("sede: 1\nsft:\n  epoch: 2\n", "`seed`"),  # of several, each
        ("sede: 1\nsft:\n  epoch: 2\n", "`sft.epochs`"),
    ],
    ids=lambda value: value.strip()[:40],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_every_field_is_explained_in_one_line() -> None:
    sections = [Params, *(type(getattr(Params(), name)) for name in Params.model_fields)]
    sections += typing.get_args(typing.get_args(AnySource)[0])
    for section in sections:
        if issubclass(section, BaseModel):
            texts = descriptions(section)
            for name in section.model_fields:
                assert texts.get(name), f"{section.__name__}.{name} has no docstring"
                assert "\n" not in texts[name], f"{section.__name__}.{name}"


def test_what_a_caller_changes_of_a_file_it_has_read_the_next_one_does_not_see(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text("section: {number: 1}\n")
    load_yaml(tmp_path / "mine.yaml")["section"]["number"] = 2
    assert load_yaml(tmp_path / "mine.yaml") == {"section": {"number": 1}}
