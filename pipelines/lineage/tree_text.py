"""A tree as text: each stage run once, with its facts, below what was produced from it."""

import shutil
import textwrap
from collections import Counter

from pipelines.lineage.facts import facts
from pipelines.lineage.stage_run import short_hash
from pipelines.lineage.target import Target
from pipelines.lineage.tree import Direction, Node, Tree
from stages.reporting.markup import printable

_WORD = 8
_LEAST_WIDTH = 60


def render(tree: Tree, target: Target, *, all_params: bool = False) -> str:
    """The target, then the tree."""
    return "\n".join([heading(target), "", *_Drawing(tree, all_params).lines()])


def heading(target: Target) -> str:
    """The target, in one or two lines."""
    if target.artifact is None:
        assert target.stage_run is not None
        return f"{target.stage_run.stage}: {where(target)}"
    artifact = target.artifact
    lines = [f"{target.title}  {artifact.path}  {artifact.hash}"]
    if target.stage_run is None:
        lines.append("given data: no stage here produced it")
    else:
        lines.append(f"made by {target.stage_run.stage}; {where(target)}")
    return "\n".join(lines)


def where(target: Target) -> str:
    """Which record it comes from."""
    stage_run = target.stage_run
    assert stage_run is not None
    if target.lock is not None and target.lock.name != "workspace":
        return f"from dvc.lock of commit {target.lock.name[:7]}"
    if stage_run.in_workspace:
        return "from the workspace's dvc.lock"
    return "from the ledger; in no dvc.lock" if stage_run.job else "from MLflow"


class _Drawing:
    def __init__(self, tree: Tree, all_params: bool) -> None:
        self._tree = tree
        self._all_params = all_params
        self._seen: set[str] = set()
        self._times = Counter(node.label for node in tree.nodes.values())
        self._environments: dict[str, str] = {}
        self._width = max(shutil.get_terminal_size((100, 24)).columns, _LEAST_WIDTH)

    def lines(self) -> list[str]:
        return self._node(self._tree.root, "", "")

    def _node(self, name: str, head: str, below: str) -> list[str]:
        node = self._tree.nodes[name]
        title = self._title(node)
        if name in self._seen:
            return [f"{head}{title} (shown above)"] if node.stage_run else [head + title]
        self._seen.add(name)
        steps = self._steps(name)
        rail = below + ("│  " if steps else "   ")
        lines = [head + title]
        if node.stage_run is not None:
            for word, text in facts(node.stage_run, all_params=self._all_params):
                lines += self._fact(rail, word, self._once(word, text, node.stage_run.stage))
        if name in self._tree.cut:
            lines.append(f"{rail}... more beyond this depth")
        for index, (other, label) in enumerate(steps):
            last = index == len(steps) - 1
            branch, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
            lines += self._node(other, f"{below}{branch}{label}", below + rest)
        return lines

    def _title(self, node: Node) -> str:
        """A node's label; where its stage appears twice, with a hash to distinguish them."""
        if node.stage_run is None:
            assert node.given is not None
            return f"{node.given.path} (given)"
        which = f" [{short_hash(next(iter(node.stage_run.outs.values()), ''))}]"
        more = f" ({node.others} other stage runs produced the same bytes)" if node.others else ""
        return node.stage_run.stage + (which if self._times[node.label] > 1 else "") + more

    def _once(self, word: str, text: str, stage: str) -> str:
        """A long environment is shown once; stages that share it refer to the first."""
        if word != "env":
            return text
        first = self._environments.setdefault(text, stage)
        return text if first == stage else f"as for {first}"

    def _fact(self, rail: str, word: str, text: str) -> list[str]:
        room = max(self._width - len(rail) - _WORD - 1, _LEAST_WIDTH // 2)
        wrapped = textwrap.wrap(
            printable(text).replace("\n", " "), room, break_long_words=False, break_on_hyphens=False
        )
        heads = [f"{word:<{_WORD}} ", *[" " * (_WORD + 1)] * len(wrapped)]
        return [f"{rail}{head}{line}" for head, line in zip(heads, wrapped, strict=False)]

    def _steps(self, name: str) -> list[tuple[str, str]]:
        """The next nodes, each once, with the artifacts that lead there."""
        labels: dict[str, list[str]] = {}
        for edge, other in self._tree.next_to(name):
            labels.setdefault(other, []).append(self._tree.label(edge))
        arrow = "←" if self._tree.direction is Direction.UP else "→"
        return [(other, f"{', '.join(each)} {arrow} ") for other, each in labels.items()]
