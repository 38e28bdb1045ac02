"""What Slurm's commands answered on one and the same cluster, under two of its releases.

The cluster: two nodes of processors, two with four A100, one with eight H100; four partitions, one
of them for an account of operators, one for jobs that are preempted by QOS. `ada` has two
accounts, `bob` has one. Recorded from Debian's packages of 24.11.5 and 26.05.5, each with its own
slurmdbd; of the configuration, the keys that concern jobs.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
RELEASES = sorted(path.stem for path in FOLDER.glob("*.txt"))


def recorded(release: str) -> dict[str, str]:
    """Answers by section: config, partitions, nodes, qos, and `user` and `assoc` of a name."""
    parts = re.split(r"^== (.+)\n", (FOLDER / f"{release}.txt").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
