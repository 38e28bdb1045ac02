"""How a vLLM ends while the GPU is full, and which GPU it is given.

On a CPU nothing sleeps, so the real engine cannot fail to wake there: one that only can fail stands
in for it.
"""

import os
import sys
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from stages.contracts.precision import Precision
from stages.engines.generation import vllm_start
from stages.engines.generation.generator import GeneratorSettings
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.generation.vllm_process import ENGINE_APART, VISIBLE
from stages.engines.generation.vllm_start import NodeWorkers
from tests.stages.test_generators import tiny_llama


class NeverWakes:
    """vLLM's LLM on a GPU that is full by the time it is to wake."""

    running = 0

    def __init__(self, *_, **__):
        self.llm_engine = SimpleNamespace(engine_core=self)
        NeverWakes.running += 1
        NeverWakes.sees = os.environ.get(VISIBLE), os.environ[ENGINE_APART]

    def collective_rpc(self, *_, **__):
        return []

    def sleep(self, level):
        assert level == 1

    def wake_up(self):
        raise MemoryError("no room to wake")

    def shutdown(self):
        NeverWakes.running -= 1


@pytest.fixture
def asleep(monkeypatch, tmp_path):
    """A factory of generators that have gone to sleep."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=NeverWakes))
    # What vLLM is told by variables stays here.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = tiny_llama(tmp_path)

    def opened():
        generator = VllmGenerator(folder, GeneratorSettings("cuda", Precision.FLOAT32, 4))
        generator.sleep()
        return generator

    return opened


def test_an_engine_that_cannot_wake_is_shut_down_and_hides_no_error(asleep):
    # Twice: a process has one vLLM at a time, so the first is really over.
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match="the learner needs more memory"),
            closing(asleep()),
        ):
            raise RuntimeError("the learner needs more memory")
        assert NeverWakes.running == 0


def test_that_it_could_not_wake_is_said_where_nothing_else_failed(asleep):
    generator = asleep()
    with pytest.raises(MemoryError, match="no room to wake"):
        generator.close()
    assert NeverWakes.running == 0
    generator.close()


def test_an_engine_in_a_process_of_its_own_is_not_woken_to_be_closed(asleep):
    os.environ[ENGINE_APART] = "1"
    asleep().close()
    assert NeverWakes.running == 0


@pytest.mark.parametrize("visible", [None, "4,7"])
@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_an_engine_on_another_gpu_than_the_first_has_a_process_that_sees_it_alone(
    monkeypatch, tmp_path, visible, device, number
):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=NeverWakes))
    others = {name: value for name, value in os.environ.items() if name != ENGINE_APART}
    monkeypatch.setattr(os, "environ", others | ({VISIBLE: visible} if visible else {}))
    VllmGenerator(tiny_llama(tmp_path), GeneratorSettings(device, Precision.FLOAT32, 4)).close()
    alone = {None: "1", "4,7": "7"}[visible]
    assert NeverWakes.sees == ((alone, "1") if number else (visible, "0"))
    assert os.environ.get(VISIBLE) == visible


def test_a_rank_ends_where_a_worker_of_its_node_is_gone_before_it_closes_them(monkeypatch, capfd):
    """vLLM says so in a thread of its own; a worker that is gone at the end is no failure."""
    ends = []
    monkeypatch.setattr(vllm_start, "CLOSING_S", 0.05)
    monkeypatch.setattr(os, "_exit", ends.append)
    workers = object.__new__(NodeWorkers)
    workers._closed, workers._executor = threading.Event(), SimpleNamespace(shutdown=lambda: None)
    workers._lost()
    assert ends == [1]
    assert "a worker of vLLM on this node has ended" in capfd.readouterr().err
    workers.close()
    workers._lost()
    assert ends == [1]
