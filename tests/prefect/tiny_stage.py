"""A stage of the tiny project: `python tiny_stage.py NAME` writes out/NAME and notes when it ran.

`behaviour.json` beside it says what else a stage does; DVC does not know of that file.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LONGEST_WAIT_S = 300.0


def events() -> list[dict[str, Any]]:
    whole, _, _being_written = Path("events.jsonl").read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def note(**values: Any) -> None:
    with Path("events.jsonl").open("a") as file:
        file.write(json.dumps({"stage": name, "time": time.time(), **values}) + "\n")


def wait_for_start_of(other: str) -> None:
    """Only a stage that runs beside this one ends the wait."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not any(event["stage"] == other for event in events()):
        if time.monotonic() > deadline:
            sys.exit(f"{other} does not run beside {name}")
        time.sleep(0.05)


def leave_in_ledger(result: dict[str, Any] | None) -> None:
    """What a stage's driver does about a job that ended so; None: it reported nothing."""
    from pipelines.base.repository import Repository
    from pipelines.config.profiles import ExecutorKind, Resources
    from pipelines.identity.spec import Spec
    from pipelines.ledger.entry import Ledger
    from pipelines.ledger.invocation import current_invocation
    from pipelines.ledger.launch import Launch
    from pipelines.ledger.record import Origin
    from pipelines.ledger.reports import Result, Worker
    from pipelines.ledger.state import State
    from pipelines.tracking.notify import start_notifier

    spec = Spec(name, name, None, {}, "code", {}, {}, "metrics.json")
    asked = Origin(invocation=current_invocation(), git_commit=None, experiment=None, title="")
    here = Path.cwd()
    launch = Launch(
        executor=ExecutorKind.LOCAL,
        profile="local",
        resources=Resources(),
        clone=here,
        root=here,
        code=here,
        user=os.getuid(),
    )
    attempt = Ledger(Path(".lockstep/jobs")).find_or_create(spec, asked).new_attempt(launch)
    attempt.write(Worker(pid=1, host="here", time=1.0))
    if result is not None:
        state = State(result.get("state", "failed"))
        attempt.write(Result(**{"ended": time.time(), **result, "state": state}))
    start_notifier(Repository(here))


name = sys.argv[1]
behaviour = json.loads(Path("behaviour.json").read_text()).get(name, {})
note(
    event="start",
    pid=os.getpid(),
    environment={key: value for key, value in os.environ.items() if "LOCKSTEP" in key},
    flow_variables=[key for key in os.environ if key.startswith(("PREFECT__", "PREFECT_API"))],
)
print(behaviour.get("says", f"this is {name}"), flush=True)
time.sleep(behaviour.get("seconds", 0))
while Path(behaviour.get("while_there_is", "no such file")).exists():
    time.sleep(0.05)
if "waits_for" in behaviour:
    wait_for_start_of(behaviour["waits_for"])
tries = sum(event["stage"] == name and event["event"] == "start" for event in events())
if tries <= behaviour.get("failures", 0):
    if "ledger" in behaviour:
        leave_in_ledger(behaviour["ledger"])
    sys.exit(f"{name} cannot go on")
Path("out").mkdir(exist_ok=True)
Path("out", name).write_text(name)
if "ledger" in behaviour:
    leave_in_ledger({"state": "completed"})
note(event="end")
