"""The numbers of every policy in the order of training, as a table that `dvc plots` draws."""

import csv
import io

from stages.reporting.evidence import Evidence
from stages.reporting.family import Family

COLUMNS = (
    "accuracy",
    "accuracy_sampled",
    "reward_mean",
    "kl_to_reference",
    "entropy",
    "response_length",
)


def render(family: Family, evidence: Evidence) -> str:
    """One row per policy, `sft` first; a cell is empty where nothing was measured."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["iteration", "policy", *COLUMNS])
    for index, policy in enumerate(family.policies):
        numbers = evidence.evaluations[policy]
        table.writerow([index, policy, *(numbers.get(column, "") for column in COLUMNS)])
    return text.getvalue()
