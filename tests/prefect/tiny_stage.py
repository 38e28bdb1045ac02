"""A stage of the tiny project: `python tiny_stage.py NAME` writes out/NAME and notes when it ran.

`behaviour.json` beside it says what else a stage does; DVC does not know of that file.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def note(**values: Any) -> None:
    with Path("events.jsonl").open("a") as file:
        file.write(json.dumps({"stage": name, "time": time.time(), **values}) + "\n")


def leave_in_ledger(result: dict[str, Any] | None) -> None:
    """What a stage's driver leaves of a job that ended so; None: it died without a word."""
    from pipelines import atomic
    from pipelines.ledger import Ledger
    from pipelines.spec import Spec

    spec = Spec(name, name, None, {}, "code", {}, {}, "metrics.json")
    attempt = Ledger(Path(".lockstep/jobs")).find_or_create(spec, {}).new_attempt({})
    atomic.write_json(attempt.folder / "worker.json", {"pid": 1})
    if result is not None:
        atomic.write_json(attempt.folder / "result.json", {"state": "failed", **result})


name = sys.argv[1]
behaviour = json.loads(Path("behaviour.json").read_text()).get(name, {})
note(
    event="start",
    pid=os.getpid(),
    environment={key: value for key, value in os.environ.items() if "LOCKSTEP" in key},
    flow_variables=[key for key in os.environ if key.startswith("PREFECT__")],
)
print(behaviour.get("says", f"this is {name}"), flush=True)
time.sleep(behaviour.get("seconds", 0))
tries = sum(
    (line := json.loads(text))["stage"] == name and line["event"] == "start"
    for text in Path("events.jsonl").read_text().splitlines()
)
if tries <= behaviour.get("failures", 0):
    if "ledger" in behaviour:
        leave_in_ledger(behaviour["ledger"])
    sys.exit(f"{name} cannot go on")
Path("out").mkdir(exist_ok=True)
Path("out", name).write_text(name)
note(event="end")
