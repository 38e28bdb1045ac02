"""vLLM under the tests of every generator, and under its own: in processes of their own.

Importing it takes ten seconds of a processor, so most of them are forked (vllm_programs.py).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from pipelines.base.processes import lives
from tests.conftest import kill_each
from tests.hardware import HAS_GPU
from tests.ports import free_port
from tests.stages.conftest import Runner
from tests.stages.test_generators import tiny_llama
from tests.stages.test_online import GRPO, OVERLAP
from tests.stages.test_online_ranks import FUSED, all_left, options_of_ranks
from tests.stages.vllm_programs import Programs
from tests.waiting import TIMEOUT_S, until

ASIDE = Path(sys.prefix) / "vllm"
"""Where `make test` installs vLLM for the CPU."""
TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None and not ASIDE.is_dir(), reason="vLLM is not installed"
)


APART = """
import sys, time
from pathlib import Path
from stages.contracts.precision import Precision
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.vllm_generator import VllmGenerator
from tests.stages.test_generators import tiny_llama

if __name__ == "__main__":  # what vLLM starts reads this file, too
    folder = tiny_llama(Path(sys.argv[1]))
    generator = VllmGenerator(folder, GeneratorSettings("cpu", Precision.FLOAT32, slots=4))
    asked = [Request([1, 5, 6], seed=1)]
    [answer] = generator.generate(asked, max_new_tokens=3, sampling=Sampling(1.0))
    print("answered" if answer.ids else "said nothing", flush=True)
    time.sleep(3000)
"""
"""A process with an engine that has one of its own, as in deterministic jobs on a GPU.

Both are fresh interpreters, as vLLM starts them; those of the other tests are forked.
"""


NOT_COMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""vLLM has the ranks of tokens, which nobody here asks for, compiled in each process: no engine of
these tests spends its first answer on a C++ compiler."""


def python_path():
    return os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS.parents[1]), str(ASIDE)]
    )


@pytest.fixture(scope="module")
def programs():
    with closing(Programs(variables())) as programs:
        yield programs


def words_of(*files):
    words = ("pytest", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=0")
    return (*words, *(str(TESTS / file) for file in files))


def variables(**more):
    return {**os.environ, "PYTHONPATH": python_path(), **NOT_COMPILED, **more}


def run(programs, log, *files):
    environment = variables(LOCKSTEP_TESTED_ENGINE="vllm")
    status = programs.wait(programs.start(*words_of(*files), environment=environment, log=log))
    print(log.read_text()[-8000:])
    assert status == 0


def run_on_gpu(*files):
    done = subprocess.run(
        [sys.executable, "-m", *words_of(*files)],
        cwd=TESTS.parents[1],
        env=variables(LOCKSTEP_TESTED_ENGINE="vllm"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout[-8000:])
    assert done.returncode == 0


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_vllm_keeps_what_a_generator_promises(programs, tmp_path):
    cases = ("test_generators.py", "vllm_cases.py", "vllm_chat_cases.py")
    run(programs, tmp_path / "log", *cases)


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_vllm_leaves_a_learner_beside_it_as_it_is(programs, tmp_path):
    run(programs, tmp_path / "log", "vllm_online_cases.py")


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_an_engine_in_a_process_of_its_own_ends_with_the_one_that_started_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(APART)
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, program, tmp_path / "policy"],
            env=variables(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    answered = lambda: "answered" in said.read_text().splitlines()  # noqa: E731
    try:
        lives_on = lambda: process.poll() is None  # noqa: E731
        until(answered, "it answers", lambda: said.read_text()[-8000:], at_work=lives_on)
        started = psutil.Process(process.pid).children(recursive=True)
        lines = []
        for each in started:
            with suppress(psutil.NoSuchProcess):
                lines.append(" ".join(each.cmdline()))
        assert [line for line in lines if line and "resource_tracker" not in line]
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    try:
        until(lambda: not any(map(lives, started)), "the engine's end")
    finally:
        kill_each(started)


TWO = ("127.0.0.11", "127.0.0.12")
"""Nodes, of which every other rank is on the first, and the names that they know each other by."""


def on_node(nodes, rank):
    return {"SLURMD_NODENAME": nodes[rank]} if nodes else {}


def said_by_ranks(programs, program, folder, nodes=None):
    """What each of two ranks has said, by what it was asked for."""
    for seed, name in enumerate(("old", "whole", "spread")):
        tiny_llama(folder / name, seed)
    group = variables(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    logs = [folder / f"log-{rank}" for rank in range(2)]
    ranks = [
        programs.start(
            f"tests.stages.{program}",
            *(folder, rank),
            environment={**group, "RANK": str(rank), **on_node(nodes, rank)},
            log=log,
        )
        for rank, log in enumerate(logs)
    ]
    ends = [programs.wait(rank) for rank in ranks]
    assert ends == [0, 0], [log.read_text()[-4000:] for log in logs]
    return [
        dict(json.loads(line) for line in (folder / f"said-{rank}").read_text().splitlines())
        for rank in range(2)
    ]


CHANGES = {
    "model": {"hidden_size": 128, "num_heads": 2},
    "rollout": {"batch_size": 4, "engine": "vllm"},
}
"""A model whose attention vLLM has on a CPU, and rollouts of several units."""
# All ranks end, by what only one of them has.
OLD_WEIGHTS = r"rank {}: .* tensor \S+ in memory is not what the learner holds"


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_a_replica_on_each_rank_takes_the_weights_of_all_through_memory(programs, tmp_path):
    for said in said_by_ranks(programs, "vllm_ranks", tmp_path):
        assert said["whole"] == said["spread"] == [True, True]
        assert re.match(OLD_WEIGHTS.format(1), said["kept old weights"])
        assert said["hash"] == ""


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
@pytest.mark.parametrize("nodes", [None, TWO], ids=["one node", "two nodes"])
def test_a_replica_over_two_ranks_takes_from_each_the_weights_of_its_worker(
    programs, tmp_path, nodes
):
    first, second = said_by_ranks(programs, "vllm_group_ranks", tmp_path, nodes)
    assert first["whole"] == first["spread"] == [True, True]
    assert second.get("workers of the second node") == ([1] if nodes else None)
    for name in ("rows of whole", "rows of spread"):
        assert first[name] == second[name]
        assert len(first[name][1]) == 3
    for said in (first, second):
        assert re.match(OLD_WEIGHTS.format(1), said["kept old weights"])
    assert first["hash"] == ""


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A factory of runs that have a policy to begin with."""
    first = Runner(tmp_path_factory.mktemp("begun"), **CHANGES)
    for address in ("prepare", "sft"):
        first.run(address)

    def copy(root):
        shutil.copytree(first.root, root)
        return Runner(root, **CHANGES)

    return copy


def ends_of_ranks(programs, runner, addresses=FUSED, world=2, nodes=None, **options):
    """How each rank of a job has ended that samples with vLLM."""
    changes = {**CHANGES, **options.pop("changes", {})}
    ranks = options_of_ranks(runner, addresses, GRPO, changes, world, "fsdp", **options)
    logs = [runner.root / f"log-{of_rank['start']}-{of_rank['rank']}" for of_rank in ranks]
    started = [
        programs.start(
            "tests.stages.vllm_online_ranks",
            json.dumps(of_rank),
            environment=variables(**on_node(nodes, of_rank["rank"])),
            log=log,
        )
        for of_rank, log in zip(ranks, logs, strict=True)
    ]
    ends = [programs.wait(rank) for rank in started]
    signs = sorted(runner.root.glob(f"signs/log-{ranks[0]['start']}-*"))
    return ends, [path.read_text() for path in signs]


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_samplers_with_vllm_give_the_bytes_of_ranks_that_sample_and_learn(
    programs, begun, tmp_path
):
    """Also where one is killed, and where one has kept old weights: others go on."""
    alone, apart = (begun(tmp_path / name) for name in ("alone", "apart"))
    ends, said = ends_of_ranks(programs, alone)
    assert ends == [0, 0], said
    ends, said = ends_of_ranks(programs, apart, samplers=1, killed=2, checkpoint_seconds=0.0)
    assert all(ends), said
    assert ends[2] == -signal.SIGKILL
    assert all("rank 2" in each for each in said[:2]), said
    ends, said = ends_of_ranks(programs, apart, samplers=2, keeps_old=3, checkpoint_seconds=0.0)
    assert all(ends), said
    assert all(re.search(OLD_WEIGHTS.format(3), each) for each in said), said
    ends, said = ends_of_ranks(programs, apart, samplers=1, checkpoint_seconds=0.0)
    assert ends == [0, 0, 0], said
    assert all_left(apart) == all_left(alone)


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_samplers_that_are_a_group_give_the_bytes_of_a_group_over_nodes_that_learns(
    programs, begun, tmp_path
):
    alone, apart = (begun(tmp_path / name) for name in ("alone", "apart"))
    common = {"changes": OVERLAP, "tensor_parallel": 2}
    for runner, samplers, nodes in ((alone, 0, TWO), (apart, 2, None)):
        ends, said = ends_of_ranks(programs, runner, samplers=samplers, nodes=nodes, **common)
        assert not any(ends), said
    assert all_left(apart) == all_left(alone)


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_a_rollout_over_nodes_has_the_bytes_of_one_on_a_node(programs, begun, tmp_path):
    rows = []
    for world, nodes in ((1, None), (2, TWO)):
        runner = begun(tmp_path / f"on-{world}")
        address = ["rollout@fast_001"]
        ends, said = ends_of_ranks(
            programs, runner, address, world, nodes, joined=True, tensor_parallel=2
        )
        assert not any(ends), said
        rows.append(runner.contents(runner.root / "artifacts/rollouts/fast_001.parquet"))
    assert rows[0] == rows[1]


@pytest.mark.gpu
def test_vllm_on_a_gpu_follows_its_weights_and_repeats():
    run_on_gpu("vllm_gpu_cases.py")


@pytest.mark.gpu
def test_vllm_on_a_gpu_answers_with_the_weights_that_it_was_given():
    run_on_gpu("vllm_gpu_given_cases.py")


@pytest.mark.gpu
def test_vllm_on_a_gpu_takes_what_nccl_has_gathered():
    run_on_gpu("vllm_gpu_spread_cases.py")
