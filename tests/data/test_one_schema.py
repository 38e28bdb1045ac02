"""The same data in any format and file type end as the same rows; later stages read them."""

import json

import pytest

from stages.context import StageError

DIALOGUES = [
    [("a", "b")],
    [("c", "d"), ("e", "f")],
    [("g", "h"), ("i", "j"), ("k", "l")],
]


def messages(dialogue):
    return [
        {"role": role, "content": text}
        for pair in dialogue
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def sharegpt(dialogue):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages(dialogue)]


def alpaca(dialogue):
    *history, (instruction, output) = dialogue
    return {"instruction": instruction, "output": output, "history": [list(p) for p in history]}


STYLES = {
    "messages": lambda dialogue: {"messages": messages(dialogue)},
    "sharegpt": lambda dialogue: {"conversations": sharegpt(dialogue)},
    "alpaca": alpaca,
    "prompt_completion": lambda dialogue: {
        "prompt": messages(dialogue)[:1],
        "completion": messages(dialogue)[1:],
    },
}


def content(run):
    left_out = ("source", "line")
    rows = run.rows("demonstrations")
    return [{k: v for k, v in row.items() if k not in left_out} for row in rows]


def test_a_dialogue_is_the_same_rows_in_every_format(prepared):
    runs = {
        name: prepared({"demonstrations.jsonl": list(map(style, DIALOGUES))}, name)
        for name, style in STYLES.items()
    }
    expected = content(runs["messages"])
    assert [row["prompt"] for row in expected] == ["a", "c", "g"]
    assert [row["loss_mask"] for row in expected] == [
        None,
        [1, 1, 0, 1, 1],
        [1, 1, 0, 1, 1, 0, 1, 1],
    ]
    for name, run in runs.items():
        assert content(run) == expected, name
        [report] = json.loads((run.root / "artifacts/data/report.json").read_text())["sources"]
        assert report["format"] == name


def test_a_table_is_the_same_rows_in_every_file_type(prepared):
    rows = [
        {"prompt": f"p{i}", "completion": f"c,\n{i}", "task": "t", "answer": str(i)}
        for i in range(5)
    ]
    plain = prepared({"demonstrations.jsonl": rows})
    for kind in ("json", "csv", "parquet", "arrow"):
        name = f"demonstrations.{kind}"
        run = prepared({name: rows}, kind)
        assert content(run) == content(plain), kind
        assert {row["source"] for row in run.rows("demonstrations")} == {name}
    assert plain.rows("demonstrations")[0]["extra"] == '{"task":"t"}'


def test_several_turns_are_trained_on_where_the_assistant_speaks(prepared):
    run = prepared({"demonstrations.jsonl": [{"messages": messages(d)} for d in DIALOGUES * 2]})
    metrics = run.run("sft")
    assert metrics["num_tokens"] == 2 + 4 + 6


@pytest.mark.parametrize(
    ("stage", "role"),
    [
        ("sft", "demonstrations"),
        ("reward_model", "preferences"),
        ("rollout@iter_001", "prompts"),
        ("reference_logprobs@dpo", "preferences"),
        ("evaluate_sft", "held_out"),
    ],
)
def test_a_stage_that_needs_a_missing_role_says_which(prepared, stage, role):
    given = (
        {"prompts.jsonl": [{"prompt": "a"}]}
        if role == "demonstrations"
        else {"demonstrations.jsonl": [{"prompt": "a", "completion": "b"}]}
    )
    run = prepared(given, rl={"preferences": {"dpo": {"policy": "sft"}}}, held_out=0)
    assert run.rows(role) == []
    if role != "demonstrations":
        run.run("sft")
    with pytest.raises(
        StageError, match=f"there are no {role}, and .* needs them.*prepare.files.{role}"
    ):
        run.run(stage)


def test_a_reward_model_without_held_out_pairs_claims_no_accuracy(prepared):
    pairs = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(4)]
    run = prepared({"preferences.jsonl": pairs}, held_out=0)
    assert "pairwise_accuracy" not in run.run("reward_model")
    quality = json.loads((run.root / "artifacts/rewards/reward_model/quality.json").read_text())
    assert quality == {"pairwise_accuracy": None, "reward_margin": None}
