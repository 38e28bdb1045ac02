"""A secret of the environment reaches no file of the ledger and nothing in MLflow."""

import pytest
from fake_clone import FakeClone

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
