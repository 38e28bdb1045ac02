"""`lockstep profile init` on clusters that are really there, each configured in another way.

What it writes must load, and every job of it must be one that sbatch would take: doctor asks it.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.base.repository import Repository
from pipelines.config.profiles import Profile, load_profile
from pipelines.doctor.slurm import examine_slurm
from pipelines.survey.asking import look
from pipelines.survey.choosing import choose
from pipelines.survey.offers import Wishes
from pipelines.survey.writing import head, profile_text, write
from stages.contracts.catalog import STAGES
from tests.slurm.conftest import SlurmClone, free_ports
from tools import slurm_cluster


@dataclass(frozen=True)
class Site:
    """How a cluster differs from the one of the other tests."""

    nodes: tuple[str, ...]
    """Of each node, what its line in slurm.conf says."""
    partitions: tuple[str, ...]
    gres: tuple[str, ...] = ()
    """Lines of gres.conf, DEV standing for the folder of devices."""
    settings: str = ""


class OtherCluster(slurm_cluster.Cluster):
    """One with nodes, partitions and settings of its own."""

    def __init__(self, layout: slurm_cluster.Layout, site: Site) -> None:
        super().__init__(layout)
        self.site = site

    def _write_files(self, address: str) -> None:
        super()._write_files(address)
        written = self.layout.conf.read_text(encoding="utf-8")
        [host] = re.findall(r"NodeHostname=\S+", written)[:1]
        kept = [line for line in written.splitlines() if not re.match("NodeName|Partition", line)]
        for place, (name, what) in enumerate(zip(self.layout.names, self.site.nodes, strict=True)):
            port = self.layout.port + 10 + place
            kept.append(f"NodeName={name} {host} NodeAddr={address} Port={port} {what}")
        lines = [*kept, *self.site.partitions, *self.site.settings.splitlines()]
        self.layout.conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
        gres = "\n".join(self.site.gres).replace("DEV", str(self.folder / "dev"))
        (self.layout.conf.parent / "gres.conf").write_text(gres + "\n", encoding="utf-8")


Start = Callable[[Site], OtherCluster]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a cluster, to which this process's Slurm commands then speak."""
    begun: list[OtherCluster] = []

    def begin(site: Site) -> OtherCluster:
        folder = Path(tempfile.mkdtemp(prefix="ls-"))
        layout = slurm_cluster.Layout(folder, port=free_ports(), nodes=len(site.nodes))
        begun.append(OtherCluster(layout, site))
        begun[-1].up()
        monkeypatch.setenv("SLURM_CONF", str(layout.conf))
        return begun[-1]

    yield begin
    for cluster in begun:
        cluster.down()
        shutil.rmtree(cluster.folder, ignore_errors=True)


def written(root: Path, **wishes: Any) -> tuple[Profile, str]:
    """The profile for the cluster that answers, and its text; sbatch takes all of its jobs."""
    cluster = look()
    text = profile_text(choose(cluster, Wishes(**wishes)), head(cluster, "mine"))
    write(root / "slurm_profiles/mine.yaml", text)
    findings = list(examine_slurm(Repository(root), "mine"))
    assert len(findings) > 1
    assert [finding for finding in findings if not finding.fine] == [], text
    return load_profile(root, "mine"), text


def prose(text: str) -> str:
    """Comments as they read, however their lines are broken."""
    return " ".join(text.replace("#", " ").split())


TWO_KINDS = Site(
    nodes=(
        "CPUs=16 RealMemory=64000 Gres=gpu:a100:2 Feature=a100,a100_80g,ib TmpDisk=500000",
        "CPUs=8 RealMemory=32000 MemSpecLimit=2000 Gres=gpu:v100:4 Feature=v100,ib",
        "CPUs=4 RealMemory=8000 Feature=old",
    ),
    partitions=(
        "PartitionName=kestrel Nodes=127.0.0.1[1-2] MaxTime=12:00:00 DefaultTime=06:00:00",
        "PartitionName=wren Nodes=127.0.0.13 Default=YES MaxTime=20",
        "PartitionName=closed Nodes=127.0.0.11 MaxTime=30-00:00:00 AllowGroups=nobody-has-this",
        "PartitionName=asleep Nodes=127.0.0.11 State=DOWN",
    ),
    gres=(
        "NodeName=127.0.0.11 Name=gpu Type=a100 File=DEV/nvidia[0-1]",
        "NodeName=127.0.0.12 Name=gpu Type=v100 File=DEV/nvidia[0-3]",
    ),
    settings="TmpFS=/local",
)


def test_of_two_kinds_of_gpus_it_takes_the_larger_and_holds_jobs_to_it(
    start: Start, tmp_path: Path
) -> None:
    start(TWO_KINDS)
    profile, text = written(tmp_path)
    sft = profile.resources("sft")
    assert (sft.partition, sft.constraint, sft.gpus_per_node) == ("kestrel", "a100", 1)
    assert (sft.cpus_per_task, sft.memory, sft.gpu_memory) == (8, "31G", "79G")
    assert (sft.time_minutes, sft.device) == (360, "cuda")
    assert "the default time limit of partition kestrel is 6 h; at most 12 h" in prose(text)
    assert "488G at /local" in prose(text)
    assert "closed: only for the groups nobody-has-this" in prose(text)
    assert "asleep closed: it is DOWN" in prose(text)

    for stage in ("prepare", "report"):
        resources = profile.resources(stage)
        assert (resources.partition, resources.device) == ("wren", "cpu")
        assert (resources.gpus_per_node, resources.constraint) == (0, None)
        assert resources.time_minutes <= 20

    # By hand the other kind, which none of its features tells from the first.
    start(
        Site(
            nodes=tuple(re.sub(r"Feature=\S+", "", each) for each in TWO_KINDS.nodes),
            partitions=TWO_KINDS.partitions[:2],
            gres=TWO_KINDS.gres,
        )
    )
    profile, text = written(tmp_path, gpus=4)
    sft = profile.resources("sft")
    assert (sft.gres, sft.gpus_per_node, sft.tasks_per_node) == ("gpu:v100:4", 0, 4)
    assert (sft.cpus_per_task, sft.memory) == (2, "30000M")
    assert profile.resources("score").gres == "gpu:v100:1"
    assert profile.resources("report").gres is None
    assert "# gpu_memory: 15G" in text  # a V100 has 16 or 32


def test_a_cluster_without_gpus_gets_a_profile_for_its_processors(
    start: Start, tmp_path: Path
) -> None:
    start(
        Site(
            nodes=("CPUs=64 RealMemory=256000", "CPUs=64 RealMemory=256000"),
            partitions=(
                "PartitionName=long Nodes=ALL MaxTime=UNLIMITED",
                "PartitionName=debug Nodes=ALL Default=YES MaxTime=5",
            ),
            settings="JobRequeue=0",
        )
    )
    profile, text = written(tmp_path)
    for stage in STAGES:
        resources = profile.resources(stage)
        assert (resources.partition, resources.device) == ("long", "cpu")
        assert resources.gpus_per_node == 0
    assert profile.defaults.memory == "31G"  # the share of 8 of 64 cores
    assert "counts no GPUs" in prose(text)
    assert "JobRequeue=0" in prose(text)

    debug, _ = written(tmp_path, partition="debug")
    assert debug.defaults.time_minutes == 5
    assert debug.defaults.requeues > profile.defaults.requeues


def test_the_command_writes_a_profile_that_doctor_accepts(slurm_clone: SlurmClone) -> None:
    """On the cluster of the other tests: spot partitions, fake GPUs, no accounting."""
    run, path = slurm_clone.run, slurm_clone.root / "slurm_profiles/lockstep.yaml"
    assert "partition gpu: " in run("lockstep", "profile", "init").stdout
    profile = load_profile(slurm_clone.root, "lockstep")
    assert (profile.defaults.partition, profile.defaults.gpus_per_node) == ("gpu", 1)
    assert profile.resources("prepare").partition == "cpu"
    said = run("lockstep", "doctor", check=False, LOCKSTEP_PROFILE="lockstep").stdout
    assert "Slurm would take them" in said
    assert "BAD  slurm" not in said
    assert "BAD  profile" not in said

    before = path.read_text()
    again = run("lockstep", "profile", "init", "--partition", "spot", check=False)
    assert again.returncode == 2
    assert "slurm_profiles/lockstep.yaml exists" in again.stdout
    assert path.read_text() == before

    run("lockstep", "profile", "init", "--partition", "spot", "--force")
    spot = load_profile(slurm_clone.root, "lockstep").defaults
    assert spot.partition == "spot"
    text = prose(path.read_text())
    assert "jobs of partition gpu, urgent preempt yours" in text
    assert "Preemption by partition gpu, urgent puts a job back into the queue" in text
    assert "A job is warned 10 s before" in text
