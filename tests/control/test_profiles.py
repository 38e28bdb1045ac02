"""Profiles are strict, and every one that ships renders for every stage."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.profiles import (
    ExecutorKind,
    Resources,
    load_profile,
    processes_of,
    tensor_parallel_of,
)
from pipelines.driver.stage import _by_hand
from pipelines.slurm.scheduler import Scheduler
from pipelines.slurm.script import Batch, batch_script
from pipelines.slurm.submit import just_wait, slurm_batches, submit_batches
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES
from stages.contracts.sharding import Sharding
from tests.ledger_values import launch

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "slurm_profiles").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    (folder / "slurm_profiles").mkdir()
    (folder / "slurm_profiles" / "mine.yaml").write_text(text)
    return folder


def render(stage: str, folder: Path, resources: Resources, **options: Any) -> str:
    """The script as it would be submitted."""
    code, root = folder / "code", folder
    return batch_script(Batch(stage, folder, resources, "token", code, root, **options))


def refused(folder: Path, text: str) -> str:
    with pytest.raises(LockstepError) as caught:
        load_profile(write(folder, text), "mine")
    return str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_renders_for_every_stage(name: str, tmp_path: Path) -> None:
    profile = load_profile(ROOT, name)
    for stage in STAGES:
        script = render(stage, tmp_path, profile.resources(stage))
        assert script.startswith("#!/bin/bash")
        assert f"--job-name=lockstep-{stage}" in script


def test_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(LockstepError, match="did you mean 'local'"):
        load_profile(ROOT, "locl")


OF_SFT = {
    "{partitio: x}": r"did you mean `stages\.sft\.partition`\?",
    "{nodes: 0}": r"mine.yaml:3: `stages\.sft\.nodes` is 0 \(int\)",
    "{time_minutes: 2, signal_lead_seconds: 90}": (
        "`stages.sft`: `time_minutes` 2 leaves no time before the signal"
    ),
    "{shards: 4}": "sft cannot be sharded, only reference_logprobs, rollout, score can",
    "{sharding: none, offload: all}": "set `sharding` to zero3 or fsdp, or `offload` to opt",
    "{sharding: zero2, offload: all}": "set `sharding` to zero3 or fsdp, or `offload` to opt",
    "{samplers: 1}": r"`stages.sft`: `samplers` 1: sft has none, only online has",
    "{sharding: zero4}": "`stages.sft.sharding`",
    "{tasks_per_node: 6, sequence_parallel: 4}": (
        r"does not divide the number of ranks, 6 \(`nodes` times `tasks_per_node`\)"
    ),
}
OF_READERS = {
    "score: {tasks_per_node: 8, sharding: fsdp, shards: 4}": "`stages.score`.*set `shards` to 1",
    "evaluate: {nodes: 2, sharding: zero3, tensor_parallel: 8}": (
        "`tensor_parallel` 8 neither divides `tasks_per_node` 1 nor .* ranks of evaluate"
    ),
    "rollout: {nodes: 2, tasks_per_node: 8, gpus_per_node: 8, tensor_parallel: 16, shards: 2}": (
        "`stages.rollout`.*set `shards` to 1"
    ),
    "rollout: {gpus_per_node: 8, device: cuda, tensor_parallel: 16}": (
        "`tensor_parallel` 16 is more than `gpus_per_node` 8, and rollout is one process"
    ),
    "rollout: {nodes: 3, tasks_per_node: 8, gpus_per_node: 8, tensor_parallel: 16}": (
        "`tensor_parallel` 16 .* which divide `nodes` 3: .* ranks of rollout"
    ),
}
OF_ONLINE = {
    "{tasks_per_node: 4, samplers: 4}": "`stages.online`: `samplers` 4 of 4 ranks .* lower `sampl",
    "{tasks_per_node: 4, samplers: -1}": r"`stages\.online\.samplers` is -1",
    "{tasks_per_node: 4, samplers: 3, tensor_parallel: 2}": (
        "`tensor_parallel` 2 does not divide `samplers` 3, .* to a multiple"
    ),
    "{nodes: 2, tasks_per_node: 8, tensor_parallel: 3}": (
        "`tensor_parallel` 3 neither divides `tasks_per_node` 8 nor .* ranks of online"
    ),
    "{nodes: 3, tasks_per_node: 8, tensor_parallel: 6}": "`tensor_parallel` 6 neither divides",
    "{nodes: 4, tasks_per_node: 8, samplers: 8, tensor_parallel: 16}": (
        "`tensor_parallel` 16 does not divide `samplers` 8"
    ),
    "{tasks_per_node: 8, gpus_per_node: 4, device: cuda, tensor_parallel: 2}": (
        "a GPU for each rank, and `gpus_per_node` 4 is less than `tasks_per_node` 8"
    ),
    "{tasks_per_node: 4, samplers: 1, sequence_parallel: 2}": (
        r"does not divide the number of ranks, 3 \(.*, less `samplers`\)"
    ),
}
MISTAKES = [
    (
        "executor: local\ndefaults:\n  cpu_per_task: 2\n",
        r"mine.yaml:3.* did you mean `defaults\.cpus_per_task`\?",
    ),
    ("parallel: 2\n", "key `executor` is missing"),
    ("executor: local\nstages:\n  stf: {nodes: 2}\n", r"did you mean `stages\.sft`\?"),
    (
        "executor: local\nstages:\n  sft: {tasks_per_node: 2}\n",
        "without Slurm a stage is one process",
    ),
    *((f"executor: slurm\nstages:\n  sft: {of}\n", said) for of, said in OF_SFT.items()),
    *((f"executor: slurm\nstages:\n  {of}\n", said) for of, said in OF_READERS.items()),
    *((f"executor: slurm\nstages:\n  online: {of}\n", said) for of, said in OF_ONLINE.items()),
]


@pytest.mark.parametrize(
    ("text", "said"), MISTAKES, ids=[text.splitlines()[-1].strip() for text, _ in MISTAKES]
)
def test_a_mistake_is_refused_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    assert re.search(said, refused(tmp_path, text))


def test_override_replaces_only_what_it_names(tmp_path: Path) -> None:
    text = "executor: slurm\ndefaults: {nodes: 2, partition: a}\nstages: {sft: {partition: b}}\n"
    profile = load_profile(write(tmp_path, text), "mine")
    assert profile.executor is ExecutorKind.SLURM
    assert (profile.resources("sft").nodes, profile.resources("sft").partition) == (2, "b")
    assert profile.resources("prepare").partition == "a"


@pytest.mark.parametrize(
    ("name", "width"), {"online": 4, "evaluate": 4, "score": 1, "policy_update": 1}.items()
)
def test_ranks_that_sample_do_so_over_the_gpus_of_neighbours(
    tmp_path: Path, name: str, width: int
) -> None:
    ranks = "nodes: 2, tasks_per_node: 8, gpus_per_node: 8, device: cuda, sharding: fsdp"
    text = f"executor: slurm\ndefaults: {{{ranks}, tensor_parallel: 4}}\n"
    resources = load_profile(write(tmp_path, text), "mine").resources(name)
    assert tensor_parallel_of(STAGES[name], resources) == width


@pytest.mark.parametrize("name", ["score", "reference_logprobs", "evaluate", "evaluate_sft"])
@pytest.mark.parametrize("sharding", list(Sharding))
def test_what_only_reads_has_ranks_where_several_processes_hold_a_model(
    name: str, sharding: Sharding
) -> None:
    stage = STAGES[name]
    one, two = (Resources(tasks_per_node=tasks, sharding=sharding) for tasks in (1, 2))
    assert processes_of(stage, one) is stage.processes
    whole = name in ("score", "reference_logprobs") and sharding not in ("zero3", "fsdp")
    assert processes_of(stage, two) is (stage.processes if whole else Processes.TOGETHER)
    assert processes_of(STAGES["rollout"], two) is Processes.SHARDS


@pytest.mark.parametrize(
    ("nodes", "width", "processes"),
    [(1, 8, Processes.SHARDS), (2, 8, Processes.SHARDS), (2, 16, Processes.TOGETHER)],
)
def test_a_rollout_has_ranks_where_its_vllm_needs_more_than_a_node(
    nodes: int, width: int, processes: Processes
) -> None:
    ranks = {"nodes": nodes, "tasks_per_node": 8, "gpus_per_node": 8}
    resources = Resources.model_validate({**ranks, "tensor_parallel": width})
    assert processes_of(STAGES["rollout"], resources) is processes
    assert tensor_parallel_of(STAGES["rollout"], resources) == width


RESOURCES = {
    "nodes: 2": "#SBATCH --nodes=2",
    "tasks_per_node: 8": "#SBATCH --ntasks-per-node=8",
    "gpus_per_node: 8": "#SBATCH --gpus-per-node=8",
    "cpus_per_task: 12": "#SBATCH --cpus-per-task=12",
    "memory: 512G": "#SBATCH --mem=512G",
    "time_minutes: 90": "#SBATCH --time=90",
    "partition: train": "#SBATCH --partition=train",
    "account: team": "#SBATCH --account=team",
    "qos: high": "#SBATCH --qos=high",
    "constraint: h200": "#SBATCH --constraint=h200",
    "exclude: node7": "#SBATCH --exclude=node7",
    "reservation: march": "#SBATCH --reservation=march",
    "gres: gpu:h200:8": "#SBATCH --gres=gpu:h200:8",
    "signal_lead_seconds: 120": "#SBATCH --signal=USR2@120",
    "licenses: matlab:2": "#SBATCH --licenses=matlab:2",
    "switches: 1@60": "#SBATCH --switches=1@60",
    "segment: 4": "#SBATCH --segment=4",
    "srun: [--container-image=a#b.sqsh, --mpi=pmix]": "'--container-image=a#b.sqsh' --mpi=pmix",
    "extra: {mail-type: END}": "#SBATCH --mail-type=END",
    "setup: [module load cuda]": "set -e\nmodule load cuda",
    "container: apptainer exec image.sif": "apptainer exec image.sif /opt/python -u -m pipelines",
    "python: /opt/python": "/opt/python -u -m pipelines.worker.worker",
}


def test_every_resource_reaches_the_script(tmp_path: Path) -> None:
    text = "executor: slurm\ndefaults:\n" + "".join(f"  {line}\n" for line in RESOURCES)
    resources = load_profile(write(tmp_path, text), "mine").resources("sft")
    script = render("sft", tmp_path, resources)
    for said in (*RESOURCES.values(), "#SBATCH --requeue", "#SBATCH --comment=lockstep:token"):
        assert said in script, said


def test_no_requeues_means_none(tmp_path: Path) -> None:
    script = render("sft", tmp_path, Resources(requeues=0))
    assert "#SBATCH --no-requeue" in script
    assert "#SBATCH --requeue" not in script


def test_where_requeueing_is_forbidden_no_job_tries_it(tmp_path: Path) -> None:
    script = render("sft", tmp_path, Resources(requeue=False), shards=[0, 1])
    assert "#SBATCH --no-requeue" in script
    assert "scontrol requeue" not in script
    told = 'scontrol update JobId="$SLURM_ARRAY_JOB_ID" ExcNodeList='
    assert told in script, "a bad node, free at once, would get the array's other tasks"


def test_an_array_names_exactly_the_missing_shards(tmp_path: Path) -> None:
    script = render("rollout", tmp_path, Resources(), shards=[0, 1, 2, 5], parallelism=3)
    assert "#SBATCH --array=0-2,5%3" in script
    assert "%A_%a_%t_log.err" in script, "each task of the array has logs of its own"


def test_an_array_beyond_slurms_limit_is_submitted_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.slurm.submit.max_array_size", lambda: 10)
    order = launch(resources=Resources(array_parallelism=4), shards=(0, 9, 10, 25))
    batches = slurm_batches("rollout", tmp_path, "token", order)
    scripts = [batch_script(batch) for batch in batches]
    for script, array, first in zip(scripts, ("0,9%2", "0%1", "5%1"), (None, 10, 20), strict=True):
        assert f"#SBATCH --array={array}" in script
        assert (f"--first-shard {first}" in script) == (first is not None)


@pytest.mark.parametrize(("parallelism", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (7, 7)])
def test_arrays_in_chunks_share_what_may_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallelism: int, most: int
) -> None:
    """An array that waits for another one runs beside none of those before it."""
    monkeypatch.setattr("pipelines.slurm.submit.max_array_size", lambda: 10)
    submitted: list[Batch] = []

    def submit(batch: Batch, **_: Any) -> str:
        submitted.append(batch)
        return f"job{len(submitted) - 1}"

    monkeypatch.setattr("pipelines.slurm.submit.submit_batch", submit)
    resources = Resources(array_parallelism=parallelism)
    order = launch(resources=resources, shards=tuple(range(30)))
    scheduler = Scheduler(Repository(tmp_path))
    submit_batches(scheduler, "rollout", tmp_path, order, pause=just_wait)
    at_once = [batch.parallelism for batch in submitted if not batch.behind]
    assert sum(at_once) == most
    assert [batch.behind for batch in submitted if batch.behind] == {
        1: [["job0"], ["job1"]],
        2: [["job0"]],
    }.get(parallelism, [])


def test_a_dry_run_of_many_arrays_says_which_waits_for_which() -> None:
    assert _by_hand(["a", "b"], 2) == "sbatch a && sbatch b"
    assert _by_hand(["a", "b", "c"], 1) == (
        "job0=$(sbatch --parsable a) && job1=$(sbatch --parsable --dependency=afterany:$job0 b) && "
        "job2=$(sbatch --parsable --dependency=afterany:$job1 c)"
    )


def test_a_percent_sign_in_the_path_is_no_pattern_of_slurms(tmp_path: Path) -> None:
    folder = tmp_path / "run%j of 50%"
    script = render("sft", folder, Resources())
    escaped = str(folder).replace("%", "%%")
    assert f"#SBATCH --output='{escaped}/%j_0_log.out'" in script
    assert f"'--error={escaped}/%j_%t_log.err'" in script
    script = render("rollout", folder, Resources(), shards=[0, 1])
    assert f"#SBATCH --error='{escaped}/%A_%a_0_log.err'" in script
    assert f"'--output={escaped}/%A_%a_%t_log.out'" in script


def test_the_successor_of_a_job_that_ended_well_does_not_wait_for_ever(tmp_path: Path) -> None:
    script = render("score", tmp_path, Resources(), succeeds="7")
    assert "#SBATCH --dependency=afternotok:7" in script
    assert "#SBATCH --kill-on-invalid-dep=yes" in script


def test_rendering_needs_no_slurm(tmp_path: Path) -> None:
    assert shutil.which("sbatch", path=str(tmp_path)) is None
    profile = load_profile(ROOT, "slurm")
    assert "srun" in render("rollout@iter_001", tmp_path, profile.resources("rollout"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('partition: "a\\nscancel 7"', "remove line breaks"),
        ('python: "python\\rx"', "remove line breaks"),
        ('extra: {mail-user: "a\\n#SBATCH --wrap=x"}', "remove line breaks"),
        ('extra: {"mail-user\\nx": a}', "remove line breaks"),
        ("extra: {output: mine.log}", "`output` is set by lockstep"),
        ("extra: {job_name: mine}", "`job_name` is set by lockstep"),
        ("extra: {wrap: sleep}", "`wrap` is set by lockstep"),
        ("extra: {segment: 2}", "use the field `segment` instead of `segment`"),
        ("srun: [--ntasks=2]", "`--ntasks` of srun is set by lockstep"),
        ("srun: [-n2]", "`-n2` must be one long flag of srun"),
        ('srun: ["--mpi=a\\nb"]', "remove line breaks"),
        ("extra: {array: 0-3}", "use the field `shards` instead of `array`"),
        ("extra: {time: 10}", "use the field `time_minutes` instead of `time`"),
        ("container: apptainer exec 'image.sif", "No closing quotation"),
    ],
)
@pytest.mark.parametrize("where", ["defaults", "stages.sft"])
def test_text_that_would_change_the_script_is_refused(
    tmp_path: Path, line: str, said: str, where: str
) -> None:
    indent = "defaults:\n  " if where == "defaults" else "stages:\n  sft:\n    "
    message = refused(tmp_path, f"executor: slurm\n{indent}{line}\n")
    assert said in message
    assert f"{where}.{line.partition(':')[0]}" in message
