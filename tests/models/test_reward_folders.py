"""Finished reward models as a source of rewards: what they say is what transformers says."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from stages.context import Context, StageError
from stages.contracts.params import Params
from stages.contracts.rewards import Model
from stages.rewards.given import given
from stages.rewards.named import NamedSource, open_scorer
from tests.models.families import FAMILIES, SIZES, write_family

ROWS = [
    {
        "prompt_id": f"p{index}",
        "sample_index": 0,
        "prompt": prompt,
        "response": response,
        "answer": None,
        "response_ids": [],
        "finish_reason": "stop",
        "extra": "{}",
    }
    for index, (prompt, response) in enumerate(
        [("1+2=", "3"), ("4+4=", "8"), ("what is 3+9?", "12 of course"), ("a", "")]
    )
]


def write_classifier(folder, family="llama", labels=1, **changes):
    """A classifier with random weights, and a tokenizer of its own."""
    write_family(folder, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = {**FAMILIES.get(family, {}), "vocab_size": len(tokenizer), "pad_token_id": 0}
    torch.manual_seed(8)
    config = AutoConfig.for_model(family, **{**SIZES, **known, "num_labels": labels, **changes})
    model = AutoModelForSequenceClassification.from_config(config)
    (folder / "config.json").unlink()
    model.save_pretrained(folder)
    return folder


def score(tmp_path, rows=ROWS, **params):
    folder = tmp_path / "job"
    folder.mkdir(exist_ok=True)
    ctx = Context(stage="score@iter_001", key="iter_001", seed=1, folder=folder)
    source = NamedSource("mine", Model(kind="model", folder="rm", **params), tmp_path)
    plain = [given(row) for row in rows]
    scorer = open_scorer(ctx, source, plain)
    try:
        return scorer.score(plain)
    finally:
        scorer.close()


@torch.no_grad()
def by_hand(folder, text_of):
    """transformers' own forward pass over each text by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return [model(**text_of(row)).logits[0] for row in ROWS]


def chat(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def text_of(row):
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        return tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)

    return text_of


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("pad", [0, None])
def test_the_reward_is_what_transformers_says_of_the_rendered_text(tmp_path, batch_size, pad):
    folder = write_classifier(tmp_path / "rm", pad_token_id=pad)
    expected = [float(logits[0]) for logits in by_hand(folder, chat(folder))]
    found = score(tmp_path, batch_size=batch_size)
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(set(found)) == len(found)


def test_a_classifier_of_pairs_of_texts_is_read_as_such(tmp_path):
    folder = write_classifier(tmp_path / "rm", "bert", num_key_value_heads=4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = by_hand(
        folder, lambda row: tokenizer(row["prompt"], row["response"], return_tensors="pt")
    )
    found = score(tmp_path, form="pair")
    assert found == pytest.approx([float(logits[0]) for logits in expected], abs=1e-5)


def test_of_several_labels_one_is_chosen_by_index_or_name(tmp_path):
    folder = write_classifier(
        tmp_path / "rm",
        labels=3,
        id2label={0: "bad", 1: "fair", 2: "good"},
        label2id={"bad": 0, "fair": 1, "good": 2},
    )
    logits = by_hand(folder, chat(folder))
    for label in (2, "good"):
        found = score(tmp_path, label=label)
        assert found == pytest.approx([float(each[2]) for each in logits], abs=1e-5)
    shares = score(tmp_path, label="bad", read="probability")
    expected = [float(each.softmax(-1)[0]) for each in logits]
    assert shares == pytest.approx(expected, abs=1e-6)
    with pytest.raises(StageError, match=r"has 3 labels, 0 \(bad\), 1 \(fair\), 2 \(good\)"):
        score(tmp_path)
    with pytest.raises(StageError, match="has no label 'great'"):
        score(tmp_path, label="great")


def test_what_is_no_finished_reward_model_is_refused(tmp_path):
    with pytest.raises(StageError, match=r"there is no such folder in score\.folder"):
        score(tmp_path)
    write_family(tmp_path / "rm", "llama")
    with pytest.raises(StageError, match=r"holds a LlamaForCausalLM.*reward_model\.start: folder"):
        score(tmp_path)


def test_a_template_is_asked_for_and_a_text_that_is_too_long_is_named(tmp_path):
    folder = write_classifier(tmp_path / "rm")
    long = {**ROWS[0], "response": "1" * 80}
    with pytest.raises(StageError, match=r"prompt p0.* 86 tokens for this model.*is 64"):
        score(tmp_path, rows=[long])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(StageError, match=r"set rewards\.mine\.chat_template to plain"):
        score(tmp_path)
    assert len(score(tmp_path, chat_template="plain")) == len(ROWS)
    (folder / "prompt.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    with pytest.raises(StageError, match=r"rewards\.mine: .* whatever the assistant says"):
        score(tmp_path, chat_template="prompt.jinja")


def test_positions_that_begin_after_the_padding_leave_room_for_fewer_tokens(tmp_path):
    """RoBERTa's first token has the position after that of padding, so its last comes earlier."""
    folder = write_classifier(tmp_path / "rm", "roberta", num_key_value_heads=4, pad_token_id=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def row_of(num_tokens):
        without = len(tokenizer("", "")["input_ids"])
        return {**ROWS[0], "prompt": "", "response": "1" * (num_tokens - without)}

    assert len(score(tmp_path, rows=[row_of(62)], form="pair")) == 1
    with pytest.raises(StageError, match=r"prompt p0.* 63 tokens for this model.*is 62"):
        score(tmp_path, rows=[row_of(63)], form="pair")


def test_a_tokenizer_may_say_that_its_model_reads_fewer_tokens(tmp_path):
    folder = write_classifier(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 20
    tokenizer.save_pretrained(folder)
    long = {**ROWS[0], "response": "1" * 20}
    with pytest.raises(StageError, match=r"26 tokens .*is 20 .*model_max_length"):
        score(tmp_path, rows=[long])
    assert len(score(tmp_path, rows=ROWS[:1])) == 1


def test_a_run_scores_by_a_model_with_another_tokenizer(runner):
    run = runner(
        rewards={"rated": {"kind": "model", "folder": "rm"}},
        rl={"reward": "rated", "algorithm": "grpo"},
        sft={"epochs": 1, "batch_size": 48},
        rollout={"prompts": 3, "samples": 2, "max_new_tokens": 6, "batch_size": 8},
    )
    write_classifier(run.root / "rewards" / "rm")
    (run.root / "rewards" / "other.py").write_text("raise SystemExit\n")
    for stage in ("prepare", "sft", "reward_source@rated", "rollout@iter_001"):
        run.run(stage)
    metrics = run.run("score@iter_001")
    kept = run.root / "artifacts/rewards/rated/folder"
    assert [path.name for path in kept.iterdir()] == ["rm"], "only the model that is meant"
    assert metrics["reward_std"] > 0


def reward_run(runner, name, **reward_model):
    """A run up to its data, whose tokenizer a reward model of the user's shares."""
    run = runner(
        name,
        model={"source": "folder", "folder": "base"},
        reward_model={"start": "folder", "batch_size": 32, **reward_model},
    )
    write_family(run.root / "base", "llama")
    run.run("prepare")
    return run


@pytest.mark.parametrize("labels", [1, 3])
def test_a_finished_reward_model_is_taken_as_it_is(runner, labels):
    label = 2 if labels > 1 else None
    run = reward_run(runner, "run", epochs=0, label=label)
    given_folder = write_classifier(run.root / "models", labels=labels)
    metrics = run.run("reward_model")
    assert metrics["num_steps"] == 0
    folder = run.root / "artifacts/rewards/reward_model"
    theirs = AutoModelForSequenceClassification.from_pretrained(given_folder).eval()
    ours = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert ours.config.num_labels == 1
    ids = torch.tensor([[1, 5, 9, 12, 2]])
    said = theirs(input_ids=ids).logits[0, label or 0]
    assert float(ours(input_ids=ids).logits[0, 0]) == pytest.approx(float(said), abs=1e-5)
    quality = json.loads((folder / "quality.json").read_text())
    assert quality["pairwise_accuracy"] == metrics["pairwise_accuracy"]


def test_a_family_without_a_classifier_of_its_own_goes_from_start_to_source_of_rewards(runner):
    """Learnt from a folder, taken as it is from the folder that it became, and read as text."""
    run = reward_run(runner, "run", epochs=1)
    write_family(run.root / "models", "granite")
    run.run("reward_model")
    learnt = run.root / "artifacts/rewards/reward_model"
    again = reward_run(runner, "again", epochs=0)
    shutil.copytree(learnt, again.root / "models", dirs_exist_ok=True)
    metrics = again.run("reward_model")
    assert metrics["num_steps"] == 0
    taken = again.root / "artifacts/rewards/reward_model"
    weights = [load_file(folder / "model.safetensors") for folder in (learnt, taken)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    shutil.copytree(learnt, run.root / "rm")
    backbone = AutoModel.from_pretrained(learnt).eval()
    text_of = chat(learnt)
    with torch.no_grad():
        hidden = [backbone(**text_of(row)).last_hidden_state[0, -1] for row in ROWS]
    expected = [float(state @ weights[0]["score.weight"][0]) for state in hidden]
    assert score(run.root, batch_size=4) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("what", ["classifier", "language model"])
def test_a_reward_model_learns_on_from_a_folder(runner, what):
    """At a rate so small that where it started from can still be seen."""
    run = reward_run(runner, "run", epochs=2, learning_rate=1e-6)
    if what == "classifier":
        folder = write_classifier(run.root / "models")
    else:
        folder = write_family(run.root / "models", "qwen2")
    metrics = run.run("reward_model")
    assert metrics["num_steps"] == 4
    before = load_file(folder / "model.safetensors")
    after = load_file(run.root / "artifacts/rewards/reward_model" / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(after[layer], before[layer], rtol=0, atol=1e-4)
    assert not torch.equal(after[layer], before[layer])
    head = after["score.weight"]
    assert head.shape[0] == 1
    if what == "classifier":
        alike = torch.cosine_similarity(head, before["score.weight"])
        assert float(alike) == pytest.approx(1.0, abs=1e-3)


def test_a_reward_model_of_another_tokenizer_is_refused_with_the_difference(runner):
    run = reward_run(runner, "run")
    folder = write_classifier(run.root / "models")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        StageError, match=r"1 tokens differ, such as '<tool>', number None for the base and \d+"
    ):
        run.run("reward_model")


def test_epochs_of_zero_need_a_model_that_rates(runner):
    run = reward_run(runner, "run", epochs=0)
    write_family(run.root / "models", "llama")
    with pytest.raises(StageError, match=r"holds a language model.*every response the reward 0"):
        run.run("reward_model")
    with pytest.raises(ValueError, match="an untrained head gives every response the reward 0"):
        Params.model_validate({"reward_model": {"epochs": 0}})
