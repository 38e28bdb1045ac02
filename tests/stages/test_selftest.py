"""What a self-test measures with torch, where something is wrong: injected, nothing is broken."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stages.engines.processes.ranks import ALONE
from stages.selftest import compute
from stages.selftest.collectives import OPERATIONS, Group, Operation, _one, pattern
from stages.selftest.compute import matmul_rate
from stages.selftest.links import measure_links
from stages.selftest.training import digest
from tests.ports import free_port

CPU = torch.device("cpu")
TWO = Group([0, 1], 0)


def answered(name: str, answer: Tensor) -> bool:
    """Whether an operation of two ranks that gives this answer counts as right."""
    real = OPERATIONS[name]
    told = Operation(lambda *_: answer.clone(), real.expected, real.share, real.in_parts)
    row = _one(ALONE, TWO, told, 1000, CPU)
    assert row is not None
    assert row["gb_per_s"] > 0
    return bool(row["right"])


def test_collectives_are_held_to_the_bit() -> None:
    ours, theirs = pattern(1000, 0, CPU), pattern(1000, 1, CPU)
    halves = torch.cat([pattern(500, 0, CPU), pattern(500, 1, CPU)])
    right = {"all-reduce": ours + theirs, "all-gather": halves, "broadcast": ours}
    assert right.keys() == OPERATIONS.keys()
    for name, answer in right.items():
        assert answered(name, answer)
        wrong = answer.clone()
        wrong[777] += 1
        assert not answered(name, wrong)
    assert not answered("all-reduce", 2 * ours), "the other rank's part is missing"
    assert not answered("all-gather", halves.flip(0))


def test_a_rank_alone_in_its_group_has_nothing_to_measure() -> None:
    assert _one(ALONE, Group([3], 0), OPERATIONS["all-reduce"], 10, CPU) is None


def test_a_product_has_a_rate_and_the_same_bits_every_time() -> None:
    one, two = matmul_rate("cpu", 0.0), matmul_rate("cpu", 0.0)
    assert one["digest"] == two["digest"]
    assert one["repeats"]
    assert one["tflops"] > 0
    assert one["error"] < 1e-5


def test_a_wrong_product_is_seen() -> None:
    left, right = torch.eye(16), torch.ones(16, 16)
    product = left @ right
    assert compute._error(left, right, product) == 0
    product[3, 3] = 1.5
    assert compute._error(left, right, product) == pytest.approx(0.5)


def test_a_digest_is_of_names_and_every_bit() -> None:
    one = {"a": torch.zeros(3), "b": torch.ones(2)}
    assert digest(one) == digest(dict(reversed(one.items())))
    assert digest(one) != digest({"a": torch.zeros(3), "c": torch.ones(2)})
    assert digest(one) != digest({**one, "b": torch.tensor([1.0, 1.0 + 2**-23])})


def test_who_fails_in_collectives_keeps_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its process ends: to the others their end would look like a fault of their own."""

    def breaks(phase: str) -> None:
        if phase == "all ranks":
            raise RuntimeError("link down")

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(RuntimeError, match="link down"):
            measure_links(0, 1, "a", "cpu", 60.0, breaks)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
