"""The judgement of a self-test: from the ranks' measurements to findings, and nothing else.

A pure function: it reads no file, no clock and no cluster, so what it says of a broken machine can
be shown without one. A check that some rank has not measured has failed, and says why.
"""

from pipelines.selftest import machine_findings, traffic_findings, training_findings
from pipelines.selftest.finding import Finding
from pipelines.selftest.seen import FAILED, SEE_LOG, Judge, Seen
from pipelines.selftest.settings import WORDS


def judge(seen: Seen) -> list[Finding]:
    """One finding or more for each check, in the order of the page."""
    findings: list[Finding] = []
    named: set[str] = set()
    # A job that ended early has left out all that came after: one line is enough for these.
    unreached = [check for check in WORDS if check not in seen.measured and check != "vllm"]
    if unreached:
        words = ", ".join(WORDS[check] for check in unreached)
        findings.append(Finding("not reached", FAILED, words, remedy=SEE_LOG))
    for checks, judges in _JUDGES.items():
        if any(check not in seen.measured for check in checks):
            continue
        missing = {check: found for check in checks if (found := _missing(seen, check))}
        findings += [found for check, found in missing.items() if check not in named]
        named |= set(missing)
        if not missing:
            findings += [finding for each in judges for finding in each(seen)]
    return findings


def _missing(seen: Seen, check: str) -> Finding | None:
    """That a check was not measured by all who had to, if so."""
    there = seen.measured.get(check, ())
    errors = [each for each in there if each.error]
    # Where one rank fails, the others only say that it did.
    errors.sort(key=lambda each: "RankLost" in (each.error or ""))
    expected = 1 if check in ("alone", "vllm") else seen.world
    if errors:
        first = errors[0]
        detail = f"{first.who}: {first.error}"
        return Finding(WORDS[check], FAILED, detail, remedy=_remedy_of(first.error))
    if len(there) < expected:
        absent = sorted(set(range(expected)) - {each.rank for each in there})
        ranks = ", ".join(map(str, absent[:8]))
        detail = f"no result of rank {ranks}: the job ended before it"
        return Finding(WORDS[check], FAILED, detail, remedy=SEE_LOG)
    return None


def _remedy_of(error: str | None) -> str:
    text = error or ""
    if "CUDA" in text or "GPU" in text:
        return "see `nvidia-smi` on that node; `device`, `gpus_per_node` and `gres` in the profile"
    if "NCCL" in text or "Gloo" in text or "gloo" in text or "RankLost" in text:
        return (
            "see the network between the nodes: set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in "
            "`setup`, and NCCL_DEBUG=INFO to see more"
        )
    if "import" in text or "No module" in text:
        return "install what is missing in the job's Python: `python`, `setup` and `container`"
    return SEE_LOG


_JUDGES: dict[tuple[str, ...], tuple[Judge, ...]] = {
    ("machine",): (
        machine_findings.nodes,
        machine_findings.versions,
        machine_findings.cores,
        machine_findings.memory,
        machine_findings.open_files,
        machine_findings.requeue,
    ),
    ("machine", "compute"): (machine_findings.gpus, machine_findings.matmul),
    ("collectives",): (traffic_findings.collectives, traffic_findings.clocks),
    ("disk",): (traffic_findings.disks,),
    ("alone", "together"): (training_findings.training,),
    ("sampler",): (training_findings.sampler,),
    ("vllm",): (lambda seen: training_findings.sampler(seen, "vllm"),),
    ("killed",): (training_findings.death,),
    ("together", "resumed"): (training_findings.resume,),
}
"""What is judged of which measurements."""
