"""A job runs the code as it was when it was submitted, and no other."""

from pathlib import Path

from pipelines.base.repository import Repository
from pipelines.identity.snapshot import take_snapshot


def test_code_of_other_bytes_is_another_copy(tmp_path: Path) -> None:
    for package in ("pipelines", "stages"):
        (tmp_path / package).mkdir()
    code = tmp_path / "stages/sft.py"
    code.write_text("steps = 1\n")
    before = take_snapshot(Repository(tmp_path))
    assert take_snapshot(Repository(tmp_path)) == before
    code.write_text("steps = 2\n")
    after = take_snapshot(Repository(tmp_path))
    said = [(folder / "stages/sft.py").read_text() for folder in (before, after)]
    assert said == ["steps = 1\n", "steps = 2\n"]
