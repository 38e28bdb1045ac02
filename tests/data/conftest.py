"""Runs of prepare on files, with what they leave."""

import json

import pyarrow.parquet as pq
import pytest

from tests.stages.conftest import Runner


class Prepared(Runner):
    """A run whose folder holds these files."""

    def __init__(self, root, written, model=None, **prepare):
        model = {"max_length": 400, **(model or {})}
        super().__init__(root, prepare={"source": "files", **prepare}, model=model)
        for name, rows in written.items():
            path = root / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            path.write_text(rows if isinstance(rows, str) else lines)

    def rows(self, role):
        return pq.read_table(self.root / f"artifacts/data/{role}.parquet").to_pylist()

    def report(self):
        """By role and source: rows read, kept, written, and why others were dropped."""
        report = json.loads((self.root / "artifacts/data/report.json").read_text())
        return {
            (row["role"], row["source"]): (
                row["read"],
                row["kept"],
                row["written"],
                row["dropped"],
            )
            for row in report["sources"]
        }


@pytest.fixture
def prepared(tmp_path):
    """A factory of runs that were prepared, with their metrics."""

    def make(written, name="run", **params):
        run = Prepared(tmp_path / name, written, **params)
        run.metrics = run.run("prepare")
        return run

    return make
