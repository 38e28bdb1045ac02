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


def test_a_copy_has_all_that_a_job_imports_and_nothing_that_python_writes(tmp_path: Path) -> None:
    written = ("pipelines/__init__.py", "stages/engines/forward/model.py", "stages/page.html")
    for name in (*written, "stages/engines/__pycache__/model.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "stages/left").symlink_to("nowhere")
    copy = take_snapshot(Repository(tmp_path))
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert {path.relative_to(copy).as_posix(): path.read_text() for path in files} == {
        name: name for name in written
    }
    (tmp_path / "stages/engines/__pycache__/other.pyc").touch()
    assert take_snapshot(Repository(tmp_path)) == copy
