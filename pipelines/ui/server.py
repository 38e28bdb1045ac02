"""`python -m pipelines.ui.server ROOT PORT`: the pages of a clone, as `lockstep up` starts them.

What it prints goes to a log that others may read, so it does not print the link.
"""

import sys
from pathlib import Path

from pipelines.base.repository import Repository
from pipelines.ui.clone import open_clone
from pipelines.ui.serve import bound, serve_at


def main(root: str, port: str) -> None:
    serve_at(open_clone(Repository(Path(root))), bound(int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
