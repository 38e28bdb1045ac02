"""Split preference pairs and instructions into what SFT, reward model and PPO learn from.

python recipes/smollm2-rlhf/split.py --source FOLDER

FOLDER holds `preference.jsonl` (prompt, chosen, rejected, source) and `instruction.jsonl` (prompt,
completion, source). A tenth of the prompts is held out by a hash of the prompt, so that a row is on
the same side whatever comes before it. `source` becomes `task`, by which the evaluation breaks its
numbers down. Instructions that were answered by models whose terms bar training on them are left
out, unless `--all` is given.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HELD_OUT = 0.1
BARRED = ("gpteacher-roleplay", "gpteacher-codegen")


def is_held_out(prompt: str) -> bool:
    """The same for prompts that differ in case and space alone."""
    words = " ".join(prompt.lower().split())
    return hashlib.sha256(words.encode()).digest()[0] < 256 * HELD_OUT


def split(source: Path, target: Path, *, everything: bool) -> dict[str, int]:
    """The files of docs/data.md in `target`; how many rows each has."""
    pairs = _rows(source / "preference.jsonl")
    told = [
        row
        for row in _rows(source / "instruction.jsonl")
        if everything or row["source"] not in BARRED
    ]
    target.mkdir(parents=True, exist_ok=True)
    kept = [row for row in pairs if is_held_out(row["prompt"])]
    learnt = [row for row in pairs if not is_held_out(row["prompt"])]
    told = [row for row in told if not is_held_out(row["prompt"])]
    files = {
        "demonstrations": [_only(row, "prompt", "completion") for row in told],
        "preferences": [_only(row, "prompt", "chosen", "rejected") for row in learnt],
        "held_out_preferences": [_only(row, "prompt", "chosen", "rejected") for row in kept],
        "prompts": [_only(row, "prompt") for row in _by_prompt([*learnt, *told])],
        "held_out": [_only(row, "prompt") for row in _by_prompt(kept)],
    }
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (target / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {name: len(rows) for name, rows in files.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise SystemExit(f"{path} is missing: --source names a folder that holds it")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _only(row: Mapping[str, Any], *columns: str) -> dict[str, Any]:
    return {**{name: row[name] for name in columns}, "task": row["source"]}


def _by_prompt(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row of each prompt."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["prompt"], row)
    return list(first.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--all", action="store_true", help="also instructions with barred sources")
    given = parser.parse_args()
    for name, count in split(given.source, given.folder, everything=given.all).items():
        print(f"{count:6} {name}")
