"""Which shards of a stage are still to be done."""

from typing import Any

from pipelines.ledger.entry import Entry, State, TaskState


def shares(entry: Entry, launch: dict[str, Any]) -> dict[str, Any]:
    """For a stage that is an array of jobs: how many shards there are, and which are not done."""
    count = launch["num_shards"]
    if count == 1:
        return {}
    each = launch["resources"]["nodes"] * launch["resources"]["tasks_per_node"]
    done = {
        task["shard"]
        for attempt in entry.attempts()
        for task in attempt.tasks
        if task["num_shards"] == count * each and task["state"] in (TaskState.DONE, State.COMPLETED)
    }
    missing = [n for n in range(count) if not done.issuperset(range(n * each, (n + 1) * each))]
    # Where all are done and nobody has written the outputs, part of the work was damaged since.
    return {"shards": missing or list(range(count))}
