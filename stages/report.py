"""report: what the run did, as one page to read in a browser and a summary to read in a terminal.

Reads numbers and samples that other stages wrote, compares the SFT policy with the final one, and
writes both files from that alone: the same inputs give the same bytes. The final policy is the last
that params.yaml names; where another is more accurate, the report says so. Where nothing says what
is right, rewards are compared instead.

In reading order: `evidence` (what is read), `family` (the tree of policies), `comparison`,
`story` and `concerns` (what may be concluded), `page`, `summary` and `curves` (how it is shown).
"""

from collections.abc import Mapping
from pathlib import Path

from stages.context import Context
from stages.contracts.report import ReportConfig
from stages.reporting import comparison, concerns, curves, evidence, page, story, summary
from stages.reporting.family import ROOT, Family
from stages.standard_error import error_metric


def run(
    config: ReportConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    family = Family(config.rl.family, frozenset(config.rl.preferences), frozenset(config.rl.online))
    results = evidence.read(inputs, family)
    pairs = comparison.pair_up(results.answered[ROOT], results.answered[family.final])
    findings = story.tell(config, family, results, pairs)
    raised = concerns.collect(family, results, config.warn)

    # The report cannot show its own hash, and an earlier report's must not change this one.
    nodes = [{**node, "outs": {}} if node["stage"] == ctx.stage else node for node in ctx.graph]

    folder = out["report"]
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "index.html", page.render(config, family, results, findings, raised, pairs, nodes)
    )
    _write(folder / "summary.md", summary.render(config, family, results, findings, raised, pairs))
    _write(folder / "curves.csv", curves.render(family, results))
    ctx.progress(1, 1, "pages")

    first, last = results.evaluations[ROOT], results.evaluations[family.final]
    metrics: dict[str, float | int] = {
        "final_reward_mean": last["reward_mean"],
        **error_metric("final_reward_mean", last.get("reward_mean_error")),
        "final_kl_to_reference": last["kl_to_reference"],
        **error_metric("final_kl_to_reference", last.get("kl_to_reference_error")),
        "final_entropy": last["entropy"],
        "num_warnings": len(raised),
    }
    if "accuracy" in first and "accuracy" in last:
        metrics["sft_accuracy"] = first["accuracy"]
        metrics["final_accuracy"] = last["accuracy"]
        metrics["accuracy_gain"] = last["accuracy"] - first["accuracy"]
        metrics |= error_metric("accuracy_gain", comparison.accuracy_gain_error(pairs))
    for name in ("win_rate", "win_rate_low", "win_rate_high"):
        if name in last:
            metrics[f"final_{name}"] = last[name]
    for name in ("reward_gain", "reward_gain_error"):
        if name in last:
            metrics[name] = last[name]
    if results.pairwise_accuracy is not None:
        metrics["reward_pairwise_accuracy"] = results.pairwise_accuracy
    return metrics


def _write(path: Path, text: str) -> None:
    # The same line ends everywhere, or the hash would depend on the system.
    path.write_text(text, encoding="utf-8", newline="\n")
