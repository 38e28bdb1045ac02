"""A stage of no real work, for what only passes specs and outputs on."""

from pipelines.identity.spec import Artifact, Spec
from pipelines.ledger.entry import Entry

SPEC = Spec(
    stage="sft",
    name="sft",
    key=None,
    config={"seed": 1},
    code="abc",
    inputs={"base": Artifact("artifacts/base", "h")},
    outs={"model": "artifacts/model"},
    metrics="metrics/sft.json",
)


def write_outputs(entry: Entry) -> None:
    """As a worker leaves them: complete."""
    (entry.out / "model").mkdir(parents=True)
    (entry.out / "model/weights").write_text("w")
    (entry.out / "metrics").write_text('{"loss": 1}')
