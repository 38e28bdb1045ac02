"""What to do with each file of two clones: a pure function of four lists of files.

Always true: a file that somebody changed there is never overwritten or removed. Only what stages
write into git (dvc.lock, metrics, code maps) comes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

RESULTS = ("dvc.lock", "metrics", "code")
"""Files and folders of git that a run writes."""

Entry = tuple[str, str]
"""A file's mode and the hash of its bytes, as git has them."""
Files = Mapping[str, Entry]


@dataclass(frozen=True)
class Reconciled:
    whole: dict[str, Entry]
    """All files that will be there."""
    bring: dict[str, Entry | None]
    """Results that are newer there; None: removed there."""
    only_there: tuple[str, ...]
    """New files of somebody there, which stay as they are."""
    conflicts: tuple[str, ...]
    """Changed there since the last command from here, and not the same here."""

    @property
    def sent(self) -> dict[str, Entry]:
        """Of these, what both clones have."""
        return {path: self.whole[path] for path in self.whole.keys() - set(self.only_there)}


def is_result(path: str) -> bool:
    return path.split("/")[0] in RESULTS


def reconcile(here: Files, there: Files, base: Files, under_way: Files) -> Reconciled:
    """`base` is what both had after the last command, `under_way` what one was about to bring."""
    whole: dict[str, Entry] = {}
    bring: dict[str, Entry | None] = {}
    only_there, conflicts = [], []
    for path in sorted({*here, *there, *base}):
        mine, theirs, last = here.get(path), there.get(path), base.get(path)
        chosen = mine
        ours = (mine, last, under_way.get(path, last))
        if theirs not in ours:
            if is_result(path) and mine == last:
                chosen = bring[path] = theirs
            elif mine is None and last is None:
                only_there.append(path)
                chosen = theirs
            else:
                conflicts.append(path)
        if chosen is not None:
            whole[path] = chosen
    return Reconciled(whole, bring, tuple(only_there), tuple(conflicts))


def after_a_run(here: Files, there: Files, base: Files) -> tuple[Reconciled, dict[str, Entry]]:
    """The same for results alone, and what both clones have once these are brought."""

    def results(files: Files) -> dict[str, Entry]:
        return {path: entry for path, entry in files.items() if is_result(path)}

    found = reconcile(results(here), results(there), results(base), {})
    kept = {path: entry for path, entry in base.items() if not is_result(path)}
    settled = dict(found.sent)
    for path in found.conflicts:
        settled.pop(path, None)
        if path in base:
            settled[path] = base[path]
    return found, kept | settled
