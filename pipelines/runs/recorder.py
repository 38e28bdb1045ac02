"""The last job of a chain: `lockstep record`, in a job, for as long as no driver lives.

It computes nothing, and waits while another command is the clone's pipeline: what that one records
is left alone. Where the job is killed, its successor records what is left.
"""

import os
import sys
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.ledger.entry import Attempt
from pipelines.runs.record import record

TARGETS = ["report"]


def main(folder: Path) -> int:
    launch = Attempt(folder).launched
    # The next command ships to MLflow: a node may not reach it.
    os.environ |= {"LOCKSTEP_TRACKING": "off", "LOCKSTEP_PROFILE": launch.profile}
    os.chdir(launch.clone)
    try:
        record(TARGETS, wait=True)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
