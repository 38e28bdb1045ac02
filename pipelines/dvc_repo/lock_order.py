"""dvc.lock in the graph's order.

DVC appends each stage as it records it, and stages that run side by side end in any order. So that
the same results are the same bytes, the entries are put in the order of a plain `dvc repro`.
"""

from pathlib import Path

from pipelines.base import atomic
from pipelines.dvc_repo.graph import nodes_in_order, open_repo
from pipelines.dvc_repo.lock_text import LOCK_HEAD, split_lock


def order_lock(root: Path) -> None:
    """Put dvc.lock's stages in order; not while somebody else's DVC command holds the clone."""
    from dvc.lock import LockError

    lock = root / "dvc.lock"
    if not lock.is_file():
        return
    try:
        with open_repo(root) as repo, repo.lock:
            place = {address: i for i, address in enumerate(nodes_in_order(repo))}
            text = lock.read_text(encoding="utf-8")
            ordered = _in_order(text, place, lock)
            if ordered != text:
                atomic.write_text(lock, ordered)
    except LockError:
        return


def _in_order(text: str, place: dict[str, int], lock: Path) -> str:
    from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

    def key(name: str) -> tuple[int, str]:
        return place.get(name, len(place)), name

    parts = split_lock(text)
    if parts is not None:
        return LOCK_HEAD + "".join(parts[name] for name in sorted(parts, key=key))
    content = parse_yaml_for_update(text, str(lock))
    stages = content.get("stages") or {}
    wanted = sorted(stages, key=key)
    if wanted == list(stages):
        return text
    for name in wanted:
        stages[name] = stages.pop(name)
    return str(dumps_yaml(content))
