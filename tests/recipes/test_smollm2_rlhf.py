"""The recipe of SFT, reward model and PPO on real preferences: what is held out stays held out."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared/data"


@pytest.fixture(scope="module")
def split():
    return runpy.run_path(ROOT / "recipes/smollm2-rlhf/split.py")["split"]


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def prompts(folder: Path, *names: str) -> set[str]:
    return {" ".join(row["prompt"].lower().split()) for n in names for row in read(folder, n)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Pairs and instructions, some of them with the same prompt."""
    folder = tmp_path / "source"
    folder.mkdir()
    pairs = [
        {"prompt": f"Question {i // 2}?", "chosen": f"yes {i}", "rejected": "no", "source": "made"}
        for i in range(400)
    ]
    told = [
        {"prompt": f"Question  {i}?", "completion": "so", "source": source}
        for i in range(200)
        for source in ("human", "gpteacher-codegen")
    ]
    for name, rows in (("preference", pairs), ("instruction", told)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rows_go_where_they_belong_and_none_is_lost(split, source, tmp_path):
    counts = split(source, tmp_path / "data", everything=False)
    assert counts["preferences"] + counts["held_out_preferences"] == 400
    assert 20 <= counts["held_out_preferences"] <= 60
    assert {row["task"] for row in read(tmp_path / "data", "demonstrations")} == {"human"}
    learnt = prompts(tmp_path / "data", "demonstrations", "preferences", "prompts")
    kept = prompts(tmp_path / "data", "held_out", "held_out_preferences")
    assert not learnt & kept
    assert len(learnt | kept) == 200
    everything = split(source, tmp_path / "all", everything=True)
    assert everything["demonstrations"] == 2 * counts["demonstrations"]


def test_a_missing_file_is_named(split, tmp_path):
    with pytest.raises(SystemExit, match=r"preference\.jsonl is missing: --source names a folder"):
        split(tmp_path, tmp_path / "data", everything=False)


@pytest.mark.skipif(not (REAL / "preference.jsonl").exists(), reason="the data are not here")
def test_the_real_pairs_are_split_without_overlap(split, tmp_path):
    counts = split(REAL, tmp_path, everything=False)
    assert counts["preferences"] + counts["held_out_preferences"] == 3512
    assert not prompts(tmp_path, "demonstrations", "preferences", "prompts") & prompts(
        tmp_path, "held_out", "held_out_preferences"
    )
