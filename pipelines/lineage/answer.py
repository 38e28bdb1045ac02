"""Gathers the records, finds what is meant, and answers in the form that is wanted."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity.hashing import HashCache
from pipelines.lineage import (
    compare_json,
    compare_text,
    drawing,
    prompts,
    row_changes,
    rows,
    rows_text,
    tree_text,
)
from pipelines.lineage import tree as trees
from pipelines.lineage.compare import compare
from pipelines.lineage.content import Content
from pipelines.lineage.mlflow_runs import Runs
from pipelines.lineage.run_index import RunIndex, gather
from pipelines.lineage.stage_run import Lock, StageRun
from pipelines.lineage.target import PROMPT, Resolver, Target
from pipelines.lineage.tree import Direction, Tree, build_tree

EQUAL, DIFFERENT = 0, 1
LARGEST_LOOK = 64 << 20
"""Bytes that are hashed to see whether an artifact in the workspace was changed by hand."""


@dataclass(frozen=True)
class Question:
    """One question; `words` are an artifact, or `diff` and two of them."""

    words: Sequence[str]
    format: str = "text"
    """text, json, mermaid, dot or html."""
    output: str | None = None
    down: bool = False
    depth: int | None = None
    rows: bool = False
    prompt: str | None = None
    limit: int | None = None
    all_params: bool = False
    ask_mlflow: bool = True


def answer(question: Question) -> int:
    """Answer one question; returns the exit status, which for a comparison is that of `diff`."""
    session = _Session(Repository.find(), question)
    match question.words:
        case [text]:
            return session.show(text)
        case ["diff", one, other]:
            return session.diff(one, other)
    raise LockstepError("usage: `lockstep lineage ARTIFACT` or `lockstep lineage diff A B`")


class _Session:
    def __init__(self, repository: Repository, question: Question) -> None:
        self._repository = repository
        self._question = question
        self._use(gather(repository))
        self._runs = Runs(repository, self._run_index.notes)

    def _use(self, run_index: RunIndex) -> None:
        self._run_index = run_index
        self._resolver = Resolver(run_index, self._repository.root)
        self._content = Content(self._repository, run_index)

    def show(self, text: str) -> int:
        question = self._question
        lock, name = self._resolver.revision(text)
        if name.startswith(PROMPT):
            return self._show_prompt(name.removeprefix(PROMPT), lock)
        note_changes(self._repository, self._run_index, self._find(text))
        if question.rows or question.prompt is not None:
            return self._show_rows(self._find(text))
        direction = Direction.DOWN if question.down else Direction.UP
        [(target, tree)] = self._trees([text], direction, question.depth)
        return self._answer(
            text=lambda: tree_text.render(tree, target, all_params=question.all_params),
            json=lambda: {"target": _target_json(target), **trees.as_json(tree)},
            mermaid=lambda: drawing.mermaid(drawing.draw(tree)),
            dot=lambda: drawing.dot(drawing.draw(tree)),
            html=lambda: _page().tree_page(tree, target, self._run_index.notes),
        )

    def diff(self, one: str, other: str) -> int:
        old, new = (target for target, _ in self._trees([one, other], Direction.UP))
        compared = compare(self._run_index, old, new)
        changes, root, limit = None, self._repository.root, self._question.limit
        if self._question.rows:
            changes = row_changes.compare_rows(self._rows(old), self._rows(new))

        def text() -> str:
            parts = [compare_text.render(compared, root)]
            if changes is not None:
                parts.append(rows_text.render_changes(changes, limit))
            return "\n\n".join(parts)

        def as_json() -> dict[str, Any]:
            shown = {} if changes is None else {"rows": row_changes.changes_json(changes, limit)}
            return {**compare_json.as_json(compared), **shown}

        self._answer(
            text=text,
            json=as_json,
            mermaid=lambda: drawing.mermaid(drawing.draw_comparison(compared)),
            dot=lambda: drawing.dot(drawing.draw_comparison(compared)),
            html=lambda: _page().diff_page(
                compared, root, (changes or [])[:limit], self._run_index.notes
            ),
        )
        return EQUAL if compared.equal else DIFFERENT

    def _rows(self, target: Target) -> rows.Rows:
        if target.stage_run is None:
            raise LockstepError(f"{target.text} was given, not made: it has no rows of training")
        found = rows.rows_of(self._content, target.stage_run)
        self._run_index.notes += [n for n in found.notes if n not in self._run_index.notes]
        return found

    def _show_rows(self, target: Target) -> int:
        found = self._rows(target)
        shown, total = rows.select(found, self._question.prompt, self._question.limit)
        return self._answer(
            text=lambda: rows_text.render_rows(found, shown, total),
            json=lambda: rows.as_json(found, shown, total),
            html=lambda: _page().rows_page(found, shown, total, self._run_index.notes),
        )

    def _show_prompt(self, wanted: str, lock: Lock | None) -> int:
        influence = prompts.trace(self._content, self._run_index, wanted, lock)
        return self._answer(
            text=lambda: rows_text.render_influence(influence),
            json=lambda: prompts.as_json(influence),
            html=lambda: _page().prompt_page(influence, self._run_index.notes),
        )

    def _trees(
        self, texts: Iterable[str], direction: Direction, depth: int | None = None
    ) -> list[tuple[Target, Tree]]:
        """Each target with its tree; a shared MLflow adds jobs that the ledger does not have."""

        def find() -> list[tuple[Target, Tree]]:
            targets = [self._find(text) for text in texts]
            return [(it, build_tree(self._run_index, it, direction, depth)) for it in targets]

        found = find()
        nodes = [node for _, tree in found for node in tree.nodes.values()]
        unknown = [node.stage_run for node in nodes if node.stage_run and not node.stage_run.jobs]
        if unknown and self._runs.is_shared and self._question.ask_mlflow:
            jobs = self._runs.jobs(unknown)
            if jobs:
                self._use(self._run_index.with_jobs(jobs))
                found = find()
        return found

    def _find(self, text: str) -> Target:
        try:
            return self._resolver.find(text)
        except LockstepError:
            made = self._made_by_run(text)
            if made is None:
                raise
            self._run_index.add(made)
            return self._resolver.find(text)

    def _made_by_run(self, text: str) -> StageRun | None:
        """What an MLflow run made that no record here knows."""
        is_id = len(text) == 32 and all(char in "0123456789abcdef" for char in text)
        return self._runs.stage_run(text) if is_id and self._question.ask_mlflow else None

    def _answer(self, **forms: Callable[[], Any]) -> int:
        wanted = self._question.format
        if wanted not in forms:
            known = ", ".join(forms)
            raise LockstepError(f"this answer is no graph: --format {wanted} is not one of {known}")
        answer = forms[wanted]()
        if wanted == "json":
            answer = json.dumps({**answer, "notes": self._run_index.notes}, indent=2, default=str)
        for note in self._run_index.notes:
            print(f"lockstep: {note}", file=sys.stderr)
        if self._question.output:
            atomic.write_text(Path(self._question.output), answer.rstrip("\n") + "\n")
        else:
            print(answer.rstrip("\n"))
        return 0


def note_changes(repository: Repository, run_index: RunIndex, target: Target) -> None:
    """Add a note if the workspace's file is not the recorded one; only if it is small."""
    artifact = target.artifact
    if artifact is None or target.lock is not run_index.workspace:
        return
    path = repository.root / artifact.path
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    small = sum(item.stat().st_size for item in files) <= LARGEST_LOOK
    if path.exists() and small and HashCache().of(path) != artifact.hash:
        run_index.notes.append(
            f"{artifact.path} in the workspace is not what dvc.lock records: this is about "
            "what is recorded; see `dvc status`"
        )


def _target_json(target: Target) -> dict[str, Any]:
    found_in = target.lock.name if target.lock else ("ledger" if target.stage_run else None)
    return {**target.as_json(), "found_in": found_in}


def _page() -> Any:
    """Imported late: only a page needs the report's drawing."""
    from pipelines.lineage import page

    return page
