"""dvc.lock in the graph's order.

DVC appends each stage as it records it, and stages that run side by side end in any order. So that
the same results are the same bytes, the entries are put in the order of a plain `dvc repro`.
"""

from pathlib import Path

from pipelines.graph import open_repo, stages_in_order


def order_lock(root: Path) -> None:
    """Put dvc.lock's stages in order; not while somebody else's DVC command holds the clone."""
    from dvc.lock import LockError
    from dvc.utils.serialize import modify_yaml

    lock = root / "dvc.lock"
    if not lock.is_file():
        return
    try:
        with open_repo(root) as repo, repo.lock:
            place = {stage.name: i for i, stage in enumerate(stages_in_order(repo))}
            with modify_yaml(str(lock)) as content:
                stages = content.get("stages") or {}
                wanted = sorted(stages, key=lambda name: (place.get(name, len(place)), name))
                for name in wanted:
                    stages[name] = stages.pop(name)
    except LockError:
        return
