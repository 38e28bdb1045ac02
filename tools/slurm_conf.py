"""The configuration of the development cluster, and why each setting is what it is."""

import getpass
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """What a cluster looks like. Nodes and GPUs are emulated: all run on this machine."""

    folder: Path
    port: int = 16817
    """Of slurmctld; the nodes' follow from ten above."""
    nodes: int = 4
    """The last one has no GPUs."""
    gpus: int = 4
    cpus: int = 8
    """That each node claims to have."""
    memory_mb: int = 4000
    max_array_size: int = 1001
    min_job_age: int = 300
    """Seconds after which an ended job is forgotten; Slurm's own default."""
    slurmd_timeout: int = 30
    """Seconds of silence that make a node DOWN; much less finds false deaths on a busy machine."""

    @property
    def conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def gpu_nodes(self) -> int:
        return max(1, self.nodes - 1)

    @property
    def names(self) -> list[str]:
        """Names that are their own addresses, so that ranks find one another by them."""
        return [f"127.0.0.1{number}" for number in range(1, self.nodes + 1)]


def slurm_conf(layout: Layout, address: str, first_job: int) -> str:
    folder, user, host = layout.folder, getpass.getuser(), socket.gethostname().split(".")[0]
    port = layout.port + 10
    node = (
        f"NodeHostname={host} NodeAddr={address} CPUs={layout.cpus} RealMemory={layout.memory_mb}"
    )
    gpu_names = f"127.0.0.1[1-{layout.gpu_nodes}]"
    lines = f"""\
ClusterName=lockstep
SlurmctldHost={host}({address})
SlurmctldPort={layout.port}
SlurmUser={user}
SlurmdUser={user}
# Loopback only.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start again only when its credential has expired: 120 s by default, 5 at least.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
MailProg=/bin/true
# No cgroups: containers seldom allow them. Memory is watched by sampling instead.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
# Start jobs at once: nobody else waits for this scheduler.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Preemption warns a job as its time limit does, with the signal that it asked for.
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
EnforcePartLimits=ALL
DependencyParameters=kill_invalid_depend
KillOnBadExit=1
# A used number would name another job's files.
FirstJobId={first_job}
MaxArraySize={layout.max_array_size}
MinJobAge={layout.min_job_age}
KillWait=5
SlurmdTimeout={layout.slurmd_timeout}
SlurmctldTimeout=30
BatchStartTimeout=20
# A busy machine may take long to answer.
MessageTimeout=30
# A node that answers again is taken back, whatever it was down for.
ReturnToService=2
# Nodes need not have what they claim to have.
SlurmdParameters=config_overrides
GresTypes=gpu
PropagateResourceLimits=NONE
AccountingStorageType=accounting_storage/none
NodeName={gpu_names} {node} Port=[{port}-{port + layout.gpu_nodes - 1}] Gres=gpu:{layout.gpus}
"""
    if layout.nodes > layout.gpu_nodes:
        lines += f"NodeName={layout.names[-1]} {node} Port={port + layout.nodes - 1}\n"
    partitions = {
        "cpu": "Nodes=ALL Default=YES PriorityTier=1 PreemptMode=OFF",
        "gpu": f"Nodes={gpu_names} PriorityTier=10 PreemptMode=OFF",
        "urgent": f"Nodes={gpu_names} PriorityTier=20 PreemptMode=OFF",
        "spot": f"Nodes={gpu_names} PriorityTier=1 PreemptMode=REQUEUE GraceTime=10",
        "spot-cancel": f"Nodes={gpu_names} PriorityTier=1 PreemptMode=CANCEL GraceTime=10",
    }
    common = "MaxTime=1440 DefaultTime=60 State=UP"
    return lines + "".join(
        f"PartitionName={name} {what} {common}\n" for name, what in partitions.items()
    )


def gres_conf(layout: Layout) -> str:
    """Fake GPUs: a file must be a device, and a link to /dev/null is one."""
    files = f"{layout.folder}/dev/nvidia[0-{layout.gpus - 1}]"
    return f"NodeName=127.0.0.1[1-{layout.gpu_nodes}] Name=gpu File={files} Flags=nvidia_gpu_env\n"


def cgroup_conf() -> str:
    """slurmd loads a cgroup plugin even when nothing uses it; only v1's starts anywhere."""
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainRAMSpace=no\n"
