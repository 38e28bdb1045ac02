"""The output of `lockstep verify`: progress while it reads, then its findings."""

import time
from pathlib import Path

from pipelines.base.console import Console, seconds
from pipelines.results.findings import Finding, Kind
from pipelines.results.verify import Verification

_MEANING = {
    Kind.EXTRA: "extra: inside a recorded folder, but not recorded",
    Kind.CHANGED: "changed: not the bytes that were recorded",
    Kind.ROTTED: "corrupted: objects in DVC's cache whose bytes do not match their names",
    Kind.MISSING: "missing from the workspace",
    Kind.LOST: "in neither the workspace nor DVC's cache",
    Kind.UNCACHED: "not in DVC's cache: this is the only copy",
    Kind.UNRECORDED: "unrecorded: dvc.lock has no hash of it",
}
_SHOWN = 20
"""Findings shown of each kind; a clone without artifacts would fill the screen."""


class Reading:
    """The progress line: how much was read, and how fast."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def show(self, done: int, total: int) -> None:
        rate = done / max(time.monotonic() - self._started, 1e-9)
        left = f", {seconds((total - done) / rate)} left" if rate and total > done else ""
        self._console.progress(f"read {size(done)} of {size(total)}, {size(rate)}/s{left}")


def render(verification: Verification, root: Path) -> str:
    """Every finding under its kind, with the command that fixes it; then a summary line."""
    elsewhere = verification.findings and Path.cwd() != root
    lines = [f"(paths and commands are those of {root})"] if elsewhere else []
    lines += [line for kind in _MEANING for line in _group(kind, verification.findings)]
    if verification.skipped:
        lines.append(f"skipped, because their jobs are running: {', '.join(verification.skipped)}")
    if verification.pruned:
        lines.append(f"removed by `lockstep prune`: {', '.join(verification.pruned)}")
    volume = size(verification.num_bytes)
    read = f"{verification.outputs} outputs, {verification.files} files, {volume} read"
    count = len(verification.findings)
    what = f"{count} finding{'s' if count > 1 else ''}" if count else "all as recorded"
    lines.append(f"{what}: {read}")
    lost = sum(finding.kind is Kind.LOST for finding in verification.findings)
    if lost:
        only = "nothing was tampered with: " if lost == count else ""
        lines.append(
            f"{only}`dvc pull` fetches what is in neither place from the remote, "
            "`dvc repro` computes it again"
        )
    return "\n".join(lines)


def _group(kind: Kind, findings: list[Finding]) -> list[str]:
    group = [finding for finding in findings if finding.kind is kind]
    lines = [f"{_MEANING[kind]} ({len(group)})"] if group else []
    for finding, after in zip(group[:_SHOWN], [*group[1:], None], strict=False):
        stage = f"  ({finding.stage})" if finding.stage else ""
        lines.append(f"  {finding.path}{stage}")
        lines += [f"      {finding.detail}"] if finding.detail else []
        if after is None or after.remedies != finding.remedies:  # shown once for a whole folder
            marks = ["->", *["or"] * len(finding.remedies)]
            lines += [f"      {m} {r}" for m, r in zip(marks, finding.remedies, strict=False)]
    if len(group) > _SHOWN:
        lines.append(f"  and {len(group) - _SHOWN} more; --json lists all")
    return lines


def size(count: float) -> str:
    """Bytes, human-readable."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
