"""What a job asks of a GPU before its stage begins, of a real one."""

import pytest

from pipelines.config.profiles import Resources
from pipelines.ledger.task import Task
from pipelines.worker.gpu_checks import wrong_with_cuda, wrong_with_gpus

pytestmark = pytest.mark.gpu


def test_a_gpu_that_works_passes_and_one_that_is_not_there_does_not() -> None:
    here = Resources(device="cuda", gpus_per_node=1)
    assert not [wrong for wrong in wrong_with_gpus(here, None) if "not free" not in wrong]
    assert not list(wrong_with_cuda(Task(), here, 60.0))
    many = Resources(device="cuda", gpus_per_node=64, tasks_per_node=64)
    [wrong] = wrong_with_cuda(Task(local_rank=63), many, 60.0)
    assert "GPU 63 is needed" in wrong
