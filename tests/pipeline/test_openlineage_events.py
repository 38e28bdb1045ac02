"""What OpenLineage is told of real stages: the graph, with the hashes of dvc.lock."""

import json
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.ledger.publish import recorded_outs

pytestmark = pytest.mark.slow


def test_events_of_a_real_run_tell_the_graph_and_restored_stages_tell_nothing(
    finished: Any,
) -> None:
    finished.without_tracking()
    path = finished.root / "events.jsonl"
    finished.variables |= {
        "OPENLINEAGE__TRANSPORT__TYPE": "file",
        "OPENLINEAGE__TRANSPORT__LOG_FILE_PATH": str(path),
        "OPENLINEAGE__TRANSPORT__APPEND": "true",
    }
    finished.set_params(report__samples=1)
    finished.run("lockstep", "run")
    finished.run("lockstep", "sync")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [event for event in events if event["eventType"] != "START"]
    assert len(events) == 2 * len(ends)
    assert {event["eventType"] for event in ends} == {"COMPLETE"}
    # The ledger knew of the stages before; the report has run once more.
    names = [event["job"]["name"] for event in ends]
    stages = set(YAML(typ="safe").load(finished.root / "dvc.lock")["stages"]) - {"code"}
    assert set(names) == stages
    assert len(names) == len(stages) + 1
    last = {event["job"]["name"]: event for event in ends}
    made = {
        out["name"]: out["facets"]["version"]["datasetVersion"]
        for event in last.values()
        for out in event["outputs"]
    }
    recorded = {p: h for outs in recorded_outs(finished.root).values() for p, h in outs.items()}
    assert made == {path: digest for path, digest in recorded.items() if path in made}
    assert {path for path in recorded if path.startswith("artifacts/")} == set(made)
    for event in last.values():
        for item in event["inputs"]:
            if item["name"] in made:
                assert item["facets"]["version"]["datasetVersion"] == made[item["name"]]
    finished.set_params(report__samples=2)
    assert "restored" in finished.run("lockstep", "run").stdout
    finished.run("lockstep", "sync")
    assert len(path.read_text().splitlines()) == len(events)
