"""Which shards of a stage are still to be done."""

from pipelines.ledger.entry import Entry
from pipelines.ledger.launch import Launch
from pipelines.ledger.state import State, TaskState


def missing_shards(entry: Entry, launch: Launch) -> tuple[int, ...] | None:
    """For a stage that is an array of jobs: the shards that are not done; else None."""
    count, each = launch.num_shards, launch.tasks_per_job
    if count == 1:
        return None
    done = {
        task.shard
        for attempt in entry.attempts()
        for task in attempt.tasks
        if task.num_shards == count * each and task.state in (TaskState.DONE, State.COMPLETED)
    }
    missing = [n for n in range(count) if not done.issuperset(range(n * each, (n + 1) * each))]
    # Where all are done and nobody has written the outputs, part of the work was damaged since.
    return tuple(missing or range(count))
