"""A program under a keeper (keeper.py): `python -I -S kept_program.py PROGRAM ARGUMENT...`

The program takes the place of this process's child: it has its input, output and variables, and all
that it starts ends with it, whatever becomes of their own variables, sessions and parents.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from stages.rewards.keeper import keep

    keep()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error}")
