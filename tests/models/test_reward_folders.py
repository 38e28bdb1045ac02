"""Finished reward models as a source of rewards: what they say is what transformers says."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from stages.context import Context, StageError
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
