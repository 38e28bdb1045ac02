"""Findings about a tiny training: ranks beside one process, sampler, a killed rank, going on."""

import re
from collections.abc import Iterator, Mapping, Sequence

from pipelines.selftest.finding import Finding
from pipelines.selftest.seen import (
    FAILED,
    OK,
    SEE_LOG,
    SLOW,
    Seen,
    few,
)

LOSS_APART = 1e-4
"""Largest difference of a step's loss or gradient norm, relative to it."""
WEIGHTS_APART = 0.02
"""Largest difference of a weight, relative to the largest step that training has moved one."""
LOGPROBS_APART = {"float32": 1e-3, "bfloat16": 0.05}
HEARD_S = 30.0
"""What survivors may need beyond the time limit of a collective to name a rank."""


def training(seen: Seen) -> Iterator[Finding]:
    alone, ranks = seen.of_first("alone"), seen.of_first("together")
    losses = _apart(alone["history"], ranks["history"])
    weights = _relative(ranks["apart"])
    how = f"`sharding` {seen.resources.sharding}"
    words = f"{seen.world} ranks ({how})" if seen.world > 1 else f"this rank ({how})"
    detail = (
        f"{words} and one process: losses {losses:.1g} apart, weights {weights:.1g} "
        f"of what {len(ranks['history'])} steps moved them"
    )
    fine = losses <= LOSS_APART and weights <= WEIGHTS_APART
    remedy = (
        "do not train here with several ranks: compare versions, look at the collectives above, "
        "and try `sharding: none`"
    )
    yield Finding("ranks equal one", OK if fine else FAILED, detail, weights, "", remedy)


def _apart(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """The largest relative difference of any step's metrics; infinite if steps are missing."""
    if len(one) != len(other):
        return float("inf")
    return max(
        abs(mine[name] - other_step.get(name, float("inf"))) / max(abs(mine[name]), 1e-9)
        for mine, other_step in zip(one, other, strict=True)
        for name in ("loss", "grad_norm")
    )


def _relative(apart: Mapping[str, float]) -> float:
    return apart["weights"] / apart["moved"] if apart.get("moved") else float("inf")


def sampler(seen: Seen, check: str = "sampler") -> Iterator[Finding]:
    results = seen.values(check)
    gap, who = max((values["mean"], each.who) for each, values in results)
    first = results[0][1]
    limit = LOGPROBS_APART[first["precision"]]
    detail = (
        f"{first['engine']} in {first['precision']}: log-probs {gap:.1g} apart on average, "
        f"{max(values['largest'] for _, values in results):.1g} at most"
    )
    if gap > limit:
        detail += f", on {who} (up to {limit:g} may be rounding)"
    remedy = "the update would learn from wrong ratios: see versions, and try rollout.engine: "
    remedy += "vllm" if first["engine"] == "torch" else "torch"
    name = "sampler equals trainer" + (", vLLM" if check == "vllm" else "")
    yield Finding(name, OK if gap <= limit else FAILED, detail, gap, "nats", remedy)


def death(seen: Seen) -> Iterator[Finding]:
    lost = seen.world - 1
    results = seen.values("killed")
    dead = results[lost][1]
    if dead["exit_status"] != -9:
        said = f": {dead['error']}" if dead["error"] else ""
        detail = f"rank {lost} was to be killed and ended with {dead['exit_status']}{said}"
        yield Finding("a rank dies", FAILED, detail, remedy=SEE_LOG)
        return
    if seen.world == 1:
        yield Finding("a rank dies", OK, "killed in the midst of training; nobody is left")
        return
    survivors = results[:lost]
    limit = seen.collective_seconds + HEARD_S
    silent = [
        f"{each.who} said {values['error'] or 'nothing'}"
        for each, values in survivors
        if not re.search(rf"\brank {lost}\b", values["error"] or "")
    ]
    longest = max(values["waited_s"] or 0.0 for _, values in survivors)
    detail = f"the others named rank {lost} within {longest:.1f} s"
    if silent:
        detail = f"rank {lost} was killed, and {few(silent)}"
    verdict = FAILED if silent else OK if longest <= limit else SLOW
    remedy = "a lost rank costs the job's whole time limit here: lower `collective_seconds`, and "
    remedy += "see that the ledger's folder is visible to all nodes"
    yield Finding("a rank dies", verdict, detail, longest, "s", remedy)


def resume(seen: Seen) -> Iterator[Finding]:
    undisturbed, resumed = seen.of_first("together"), seen.of_first("resumed")
    step = resumed["resumed_from"]
    begins = f"went on from step {step}" if step else "found no checkpoint"
    equal = undisturbed["digest"] == resumed["digest"]
    weights = _relative(resumed["apart"])
    detail = f"{begins} and ended with the bytes of the run that was not killed"
    verdict = OK if step and equal else FAILED
    if not equal:
        detail = f"{begins} and ended {weights:.1g} of what training moved apart"
        if step and not seen.resources.deterministic and weights <= WEIGHTS_APART:
            verdict, detail = OK, f"{detail}, which is rounding: `deterministic` is false"
    remedy = "see the disk's checks above; with `deterministic: true` and equal bytes nothing else "
    remedy += "than the checkpoint can differ"
    yield Finding("kill and resume", verdict, detail, step, "steps", remedy)
