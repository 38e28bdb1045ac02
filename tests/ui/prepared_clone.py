"""A clone whose data `prepare` itself wrote, with a row for every reason to be dropped."""

import json
from pathlib import Path

from pipelines.ui.clone import Clone
from tests.data.conftest import Prepared

HOSTILE = "<img src=x onerror=\"document.title='ran'\"> \u202e é日"
WRONG = '{"prompt": 7, "completion": "no text"}\n'
CHAT = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and one?"},
    {"role": "assistant", "content": "five"},
]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def prepared_clone(root: Path, num_plain: int = 30) -> Clone:
    """`held.jsonl` is held out; of `shown.jsonl`, lines 3, 4, 5 and 6 are dropped."""
    shown = lines(
        {"prompt": HOSTILE, "completion": HOSTILE},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b"},
        {"prompt": " Held  OUT!", "completion": "c"},
        {"prompt": "long", "completion": "x" * 500},
    )
    plain = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(num_plain)]
    run = Prepared(
        root,
        {
            "shown.jsonl": shown + WRONG + lines(*plain),
            "chats.jsonl": lines({"messages": CHAT}),
            "pairs.jsonl": [{"prompt": "p", "chosen": "good", "rejected": "bad <b>"}],
            "steps.jsonl": [
                {"prompt": "s", "completions": ["one", "two"], "labels": [True, False]}
            ],
            "held.jsonl": [{"prompt": "held out", "answer": "1"}],
            "asked.jsonl": [{"prompt": f"ask {i}"} for i in range(4)],
        },
        files={
            "demonstrations": ["shown.jsonl", "chats.jsonl"],
            "preferences": "pairs.jsonl",
            "steps": "steps.jsonl",
            "prompts": "asked.jsonl",
            "held_out": "held.jsonl",
        },
        held_out=0,
        bad_rows="drop",
    )
    metrics = root / "metrics/prepare.json"
    metrics.parent.mkdir()
    metrics.write_text(json.dumps(run.run("prepare")))
    # YAML's readers read JSON; only what is not the default, as a user would write it.
    (root / "params.yaml").write_text(run.params.model_dump_json(exclude_unset=True))
    (root / "dvc.yaml").write_text("stages: {}\n")
    return Clone(root, "token")
