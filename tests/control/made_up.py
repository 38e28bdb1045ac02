"""A spec of no real stage, for what only passes specs on."""

from pipelines.identity.spec import Artifact, Spec

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
