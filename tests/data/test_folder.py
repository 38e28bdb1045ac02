"""What may lie in the folder with the data, and what nothing reads."""

import gzip
import json
import os

import pytest

from stages.context import StageError

PROMPTS = "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(8))
HELD_OUT = "prompt\tanswer\nheld out\t1\n"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run/data"
    made.mkdir(parents=True)
    (made / "prompts.jsonl").write_text(PROMPTS)
    return made


MAKES = {
    "held_out.jsonl.lz4": lambda path: path.write_bytes(b"x"),
    "held_out.parquet.gz": lambda path: path.write_bytes(gzip.compress(b"x")),
    "held_out": lambda path: path.mkdir(),
    "held_out.md": lambda path: path.write_text("x"),
    "held_out.jsonl": lambda path: os.mkfifo(path),
    "held_out.json": lambda path: path.symlink_to("nowhere"),
    "held_out.csv.dvc": lambda path: path.write_text("outs: []"),
    "heldout.jsonl": lambda path: path.write_text(PROMPTS),
}


@pytest.mark.parametrize("name", MAKES)
def test_what_nothing_reads_is_refused_by_name_and_with_the_types_that_are_read(
    prepared, folder, name
):
    MAKES[name](folder / name)
    with pytest.raises(StageError) as refused:
        prepared({}, held_out=2)
    assert f"data has what nothing reads: {name} (" in str(refused.value)
    assert "held_out.*" in str(refused.value)
    assert ".jsonl, .csv, .tsv (also with .gz" in str(refused.value)


def test_a_file_that_was_not_pulled_says_so(prepared, folder):
    (folder / "held_out.jsonl.dvc").write_text("outs: []")
    with pytest.raises(StageError, match=r"held_out\.jsonl is not here: `dvc pull` brings it"):
        prepared({}, held_out=2)


def test_what_is_written_about_the_data_may_lie_beside_them(prepared, folder):
    for name in ("README", "LICENCE.txt", "notes.md", ".gitignore", "prompts.jsonl.dvc"):
        (folder / name).write_text("x")
    (folder / ".cache").mkdir()
    run = prepared({"held_out.tsv": HELD_OUT})
    assert [row["prompt"] for row in run.rows("held_out")] == ["held out"]
    assert run.metrics["num_prompts"] == 8


@pytest.mark.parametrize("name", ["held_out.jsonl", "held_out.rows", "held_out"])
def test_a_held_out_file_that_no_source_names_is_not_passed_over(prepared, folder, name):
    (folder / name).write_text(PROMPTS)
    with pytest.raises(StageError, match=rf"{name} is read by nothing.*prepare\.files\.held_out"):
        prepared({}, files={"prompts": "prompts.jsonl"}, held_out=2)


def test_a_glob_does_not_pass_over_a_link_to_nothing(prepared, folder):
    (folder / "more.jsonl").symlink_to("nowhere")
    with pytest.raises(StageError, match=r"files\.prompts: .*more\.jsonl is a link to nothing"):
        prepared({}, files={"prompts": "*.jsonl"}, held_out=0)


def test_what_lies_beside_named_sources_is_reported(prepared, folder):
    (folder / "raw").mkdir()
    (folder / "raw/a.jsonl").write_text(PROMPTS)
    (folder / "used").mkdir()
    (folder / "used/a.jsonl").write_text(PROMPTS)
    (folder / "README.md").write_text("x")
    run = prepared({}, files={"prompts": "used/*"}, held_out=0)
    report = json.loads((run.root / "artifacts/data/report.json").read_text())
    assert report["unused_files"] == ["prompts.jsonl", "raw"]
