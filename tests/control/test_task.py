"""Which process of a job this is, as Slurm's variables say it."""

import pytest

from pipelines.config.profiles import Resources
from pipelines.ledger.task import Task, find_task
from stages.contracts.base import Processes


def variables(task: int = 0, tasks: int = 1, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": str(tasks),
        "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "70",
        **more,
    }


def array(index: int) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "60", "SLURM_ARRAY_TASK_ID": str(index)}


def test_ranks_are_numbered_over_all_nodes() -> None:
    task = find_task(Processes.TOGETHER, 1, environment=variables(5, 8))
    assert (task.rank, task.world, task.shard, task.num_shards) == (5, 8, 0, 1)
    assert not task.leads
    assert task.what() == "rank 5 of 8"


def test_every_process_of_every_array_task_is_a_shard_of_its_own() -> None:
    tasks = [
        find_task(Processes.SHARDS, 3, environment=variables(number, 2, **array(index)))
        for index in range(3)
        for number in range(2)
    ]
    assert [task.shard for task in tasks] == [0, 1, 2, 3, 4, 5]
    assert {task.num_shards for task in tasks} == {6}
    assert len({task.label for task in tasks}) == 6
    assert all(task.leads for task in tasks), "whoever finds all done may write"


def test_an_array_in_chunks_counts_on() -> None:
    task = find_task(Processes.SHARDS, 9, first_shard=4, environment=variables(**array(2)))
    assert (task.shard, task.num_shards) == (6, 9)


def test_a_task_of_an_array_is_known_by_the_arrays_number() -> None:
    """Its own SLURM_JOB_ID may be that of the whole array."""
    task = find_task(Processes.SHARDS, 3, environment=variables(1, 2, **array(2)))
    assert (task.job, task.log) == ("60_2", "60_2_1_log")


@pytest.mark.parametrize("task", [0, 1])
def test_a_stage_for_one_process_leaves_the_others_idle(task: int) -> None:
    assert find_task(Processes.ONE, 1, environment=variables(task, 2)).idle == bool(task)


def test_restarts_are_counted() -> None:
    task = find_task(Processes.ONE, 1, environment=variables(SLURM_RESTART_COUNT="2"))
    assert task.restart == 2


def test_inputs_are_checked_once_a_node_by_ranks_and_by_every_shard() -> None:
    of_node = lambda local: variables(5, 8) | {"SLURM_LOCALID": local}  # noqa: E731
    for processes, expected in (
        (Processes.TOGETHER, [True, False]),
        (Processes.SHARDS, [True] * 2),
    ):
        tasks = [find_task(processes, 1, environment=of_node(local)) for local in "01"]
        assert [task.reads_for_its_node for task in tasks] == expected


@pytest.mark.parametrize(
    ("gpus", "local_rank", "device"),
    [(8, 3, "cuda:3"), (2, 3, "cuda:1"), (1, 3, "cuda:0"), (0, 3, "cuda:3")],
)
def test_tasks_take_the_gpus_of_their_node_in_turn(gpus: int, local_rank: int, device: str) -> None:
    """Where `gres` asks for GPUs, their number is not known: one each."""
    resources = Resources(device="cuda", tasks_per_node=4, gpus_per_node=gpus)
    task = find_task(
        Processes.TOGETHER, 1, environment=variables(3, 4, SLURM_LOCALID=str(local_rank))
    )
    assert task.device(resources) == device
    assert Task().device(resources) == "cuda"
    assert task.device(Resources()) == "cpu"
