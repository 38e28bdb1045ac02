"""The node that this process is on, by the name that the job's other nodes know it by."""

import os
import socket


def node_name() -> str:
    """As Slurm's node list has it; without Slurm, as the machine calls itself.

    Slurm's own daemons reach each other by these names. What a machine calls itself need not
    resolve from elsewhere, and may be the same in the containers of two nodes.
    """
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
