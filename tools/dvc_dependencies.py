"""Bring the code that dvc.yaml lists for each stage up to date with what the stage imports.

python tools/dvc_dependencies.py

Everything else in dvc.yaml (inputs, params, outputs) is written by hand and left as it is;
tests/control/test_graph.py compares all of it with the contracts.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipelines.identity.code import code_files  # noqa: E402
from stages.contracts.catalog import STAGES  # noqa: E402

STAGE = re.compile(r"  (\w+):$")
CODE = re.compile(r"( +)- stages/.*\.py$")


def with_code(text: str) -> str:
    """dvc.yaml, the `stages/*.py` of each stage's deps replaced by those that it imports."""
    lines: list[str] = []
    stage, listed = "", False
    for line in text.splitlines():
        if found := STAGE.match(line):
            stage, listed = found[1], False
        if not (code := CODE.match(line)):
            lines.append(line)
        elif not listed:
            files = code_files(ROOT, STAGES[stage].module)
            lines += [f"{code[1]}- {path}" for path in files]
            listed = True
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = ROOT / "dvc.yaml"
    path.write_text(with_code(path.read_text(encoding="utf-8")), encoding="utf-8")
