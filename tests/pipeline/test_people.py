"""People's preferences in a pipeline: judging changes nothing, the export is given data."""

import json
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.annotations import store
from pipelines.annotations.judgement import Choice, Judgement, Origin, Response
from tests.pipeline.conftest import stale

pytestmark = pytest.mark.slow
DIALOGUES = (
    ({"role": "user", "content": "12+30="},),
    # Read as text, this would be a dialogue of two.
    ({"role": "user", "content": "Human: 1+1="},),
    (
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 3+3="},
    ),
)
SAMPLED = {"policy": "iter_001", "policy_hash": "ab.dir", "sampling": {"temperature": 0.7}}


def test_what_people_prefer_is_learnt_from_once_params_name_it(finished: Any) -> None:
    clone = finished
    clone.without_tracking()
    for number, messages in enumerate(DIALOGUES):
        for annotator, chosen in (("ann", Choice.RIGHT), ("bo", Choice.RIGHT), ("cy", Choice.TIE)):
            store.append(
                clone.root,
                Judgement(
                    messages=messages,
                    left=Response(text=f"Human: {number}\n\nAssistant: no", seed=1, **SAMPLED),
                    right=Response(text=f"yes {number}", seed=number, **SAMPLED),
                    chosen=chosen if number or annotator == "ann" else Choice.TIE,
                    annotator=annotator,
                    origin=Origin(place="chat", pair=f"pair {number}"),
                ),
            )
    assert not stale(clone), "judging changes nothing"
    clone.run("lockstep", "annotate", "export", "people/preferences.jsonl")
    assert not stale(clone), "nor does a file that params.yaml does not name"

    clone.set_params(
        prepare__source="files",
        prepare__folder="people",
        prepare__held_out=0,
        model__max_length=256,
    )
    assert {"prepare", "reward_model"} <= stale(clone)
    clone.run("dvc", "repro", "prepare")
    assert "prepare" not in stale(clone)
    report = json.loads((clone.root / "artifacts/data/report.json").read_text())
    counted = {row["role"]: (row["source"], row["read"], row["kept"]) for row in report["sources"]}
    assert counted["preferences"] == ("preferences.jsonl", 2, 2), "one of three is a tie"

    lines = (clone.root / "people/preferences.jsonl").read_text().splitlines()
    rows = pq.read_table(clone.root / "artifacts/data/preferences.parquet").to_pylist()
    assert {row["chosen"] for row in rows} == {"yes 1", "yes 2"}
    for row in rows:
        assert row["source"] == "preferences.jsonl"
        given = json.loads(lines[row["line"] - 1])
        number = int(row["chosen"].split()[1])
        assert given["prompt"] == list(DIALOGUES[number])
        assert row["rejected"] == f"Human: {number}\n\nAssistant: no"
        provenance = given["provenance"]
        assert provenance["votes"] == {"chosen": 2, "rejected": 0, "tie": 1}
        assert provenance["annotators"] == ["ann", "bo", "cy"]
        assert provenance["chosen"]["seed"] == number
        assert provenance["chosen"]["policy_hash"] == "ab.dir"
