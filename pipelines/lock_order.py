"""dvc.lock in the graph's order.

DVC appends each stage as it records it, and stages that run side by side end in any order. So that
the same results are the same bytes, the entries are put in the order of a plain `dvc repro`.
"""

from pathlib import Path

from pipelines import atomic
from pipelines.graph import open_repo, stages_in_order


def order_lock(root: Path) -> None:
    """Put dvc.lock's stages in order; not while somebody else's DVC command holds the clone."""
    from dvc.lock import LockError
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    lock = root / "dvc.lock"
    if not lock.is_file():
        return
    try:
        with open_repo(root) as repo, repo.lock:
            place = {stage.name: i for i, stage in enumerate(stages_in_order(repo))}
            content = parse_yaml_for_update(lock.read_text(encoding="utf-8"), str(lock))
            stages = content.get("stages") or {}
            wanted = sorted(stages, key=lambda name: (place.get(name, len(place)), name))
            before = list(stages)
            for name in wanted:
                stages[name] = stages.pop(name)
            if wanted != before:
                atomic.write_text(lock, dumps_yaml(content))
    except LockError:
        return
