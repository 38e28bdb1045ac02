"""report: one page that shows what the run did, and the same in short as Markdown."""

from stages.contracts.base import Stage, StageConfig
from stages.contracts.params import Params


class ReportConfig(StageConfig, Params):
    """What report sees of params.yaml: all, because it shows what differs from the defaults."""


REPORT = Stage(
    name="report",
    module="stages.report",
    config=ReportConfig,
    inputs={
        "iterations": "metrics/iterations",
        "evaluation_metrics": "metrics/evaluations",
        "evaluations": "artifacts/evaluations",
        "sft": "metrics/sft.json",
        "prepare": "metrics/prepare.json",
        "reward": "artifacts/rewards/{reward}",
    },
    outs={"report": "artifacts/report"},
    metrics="metrics/report.json",
    wants_graph=True,
)
