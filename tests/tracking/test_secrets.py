"""A secret of the environment reaches no file of the ledger, no address and nothing in MLflow."""

import pytest
from fake_clone import FakeClone

from pipelines.tracking.cursor import store_address

SECRET = "hunter2-planted-secret"


def test_a_planted_secret_is_nowhere(clone: FakeClone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("DATABASE_PASSWORD", f"{SECRET}-2")
    entry = clone.entry("rollout@iter_001")
    attempt = clone.start(entry, steps=2)
    log = attempt.folder / "77_0_log.err"
    log.write_text(f"connecting with {SECRET}\nand {SECRET}-2\n")
    clone.table(entry, [{"prompt": "say it", "response": SECRET, "reward": 0.0}])
    clone.end(entry, "failed", error=f"server said no to {SECRET}")
    assert clone.sync() is None
    log.unlink()
    (entry.folder / "tables" / "samples.json").unlink()
    (attempt.folder / "result.json").unlink()
    found = [path for path in clone.root.rglob("*") if path.is_file()]
    assert any(path.name == "77_0_log.err" for path in found)
    assert any(path.name == "samples.json" for path in found)
    for path in found:
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("https://me:secret@mlflow.example/base", "https://mlflow.example/base"),
        ("postgresql://me:secret@db:5432/mlflow?password=x", "postgresql://db:5432/mlflow"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("databricks", "databricks"),
    ],
)
def test_credentials_are_left_out(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch, uri: str, address: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert store_address(clone.repository) == address
