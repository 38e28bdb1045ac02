"""Runs of prepare on files, with what they leave."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.stages.conftest import Runner


def write_rows(path, rows):
    """Rows in a file of the type that its name tells, as text already or to be written so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case _ if isinstance(rows, str):
            path.write_text(rows)
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table, max_chunksize=2)
        case ".csv" | ".tsv" as kind:
            with path.open("w", newline="") as file:
                out = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == ".csv" else "\t")
                out.writeheader()
                out.writerows(rows)
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Prepared(Runner):
    """A run whose folder holds these files."""

    def __init__(self, root, written, model=None, rl=None, **prepare):
        model = {"max_length": 400, **(model or {})}
        prepare = {"source": "files", **prepare}
        super().__init__(root, prepare=prepare, model=model, rl=rl or {})
        for name, rows in written.items():
            write_rows(root / "data" / name, rows)

    def rows(self, role):
        return pq.read_table(self.root / f"artifacts/data/{role}.parquet").to_pylist()

    def report(self):
        """By role and source: rows read, kept, written, and why others were dropped."""
        report = json.loads((self.root / "artifacts/data/report.json").read_text())
        counted = ("read", "kept", "written", "dropped")
        return {
            (row["role"], row["source"]): tuple(row[name] for name in counted)
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
