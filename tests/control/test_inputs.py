"""What a job is about to read against the hashes in its spec."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.identity.hashing import hash_bytes
from pipelines.identity.spec import Artifact, Spec
from pipelines.worker.inputs import check_inputs
from stages.context import StageError, Stopped
from tests.control.made_up import SPEC


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """A stage that reads a folder and a file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights").write_bytes(b"0123")
    (tmp_path / "model/config").write_text("{}")
    (tmp_path / "rows").write_text("a row")
    hashed = {name: Artifact(name, hash_bytes(tmp_path / name)) for name in ("model", "rows")}
    return replace(SPEC, inputs=hashed)


def test_inputs_that_are_what_the_spec_says_may_be_read(spec: Spec, tmp_path: Path) -> None:
    check_inputs(spec, tmp_path, lambda: False)


@pytest.mark.parametrize(
    ("name", "path", "content"),
    [
        ("model", "model/weights", "0124"),
        ("model", "model/left_over", ""),
        ("rows", "rows", "a row\n"),
    ],
)
def test_an_input_of_other_bytes_is_refused_by_name(
    spec: Spec, tmp_path: Path, name: str, path: str, content: str
) -> None:
    (tmp_path / path).write_text(content)
    with pytest.raises(
        StageError, match=f"its input `{name}` .* is not what the stage was"
    ) as said:
        check_inputs(spec, tmp_path, lambda: False)
    assert spec.inputs[name].hash in str(said.value)


def test_an_input_that_is_gone_is_named(spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "rows").unlink()
    with pytest.raises(StageError, match=r"its input `rows` .* is gone"):
        check_inputs(spec, tmp_path, lambda: False)


def test_hashing_ends_when_the_job_is_told_to_stop(spec: Spec, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        check_inputs(spec, tmp_path, lambda: True)
