"""Gathers the records, finds what is meant, and answers in the form that is wanted."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity.hashing import HashCache
from pipelines.lineage import (
    compare,
    compare_json,
    drawing,
    prompts,
    row_changes,
    rows,
    tree,
    tree_text,
)
from pipelines.lineage.content import Content
from pipelines.lineage.history import History
from pipelines.lineage.mlflow_runs import Runs
from pipelines.lineage.question import Format, Question
from pipelines.lineage.run_index import RunIndex, gather
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.target import PROMPT, Resolver, Target

EQUAL, DIFFERENT = 0, 1
LARGEST_LOOK = 64 << 20
"""Bytes that are hashed to see whether an artifact in the workspace was changed by hand."""


def answer(question: Question) -> int:
    """Answer one question; returns the exit status, which for a comparison is that of `diff`."""
    session = _Session(Repository.find(), question)
    if question.words[0] == "diff" and len(question.words) == 3:
        return session.diff(*question.words[1:])
    if len(question.words) != 1:
        raise LockstepError("usage: `lockstep lineage ARTIFACT` or `lockstep lineage diff A B`")
    return session.show(question.words[0])


class _Session:
    def __init__(self, repository: Repository, question: Question) -> None:
        self._repository = repository
        self._question = question
        self._history = History(repository.root)
        self._use(gather(repository))
        self._runs = Runs(repository, self._run_index.notes)

    def _use(self, run_index: RunIndex) -> None:
        self._run_index = run_index
        self._resolver = Resolver(run_index, self._repository.root, self._history)
        self._content = Content(self._repository, run_index)

    def show(self, text: str) -> int:
        _, name = self._resolver.revision(text)
        if name.startswith(PROMPT):
            return self._show_prompt(text)
        target = self._find(text)
        self._warn_of_changes(target)
        if self._question.rows or self._question.prompt is not None:
            return self._show_rows(target)
        way = tree.Direction.DOWN if self._question.down else tree.Direction.UP
        grown = tree.build_tree(self._run_index, target, way, self._question.depth)
        if self._learn_jobs([node.stage_run for node in grown.nodes.values() if node.stage_run]):
            target = self._find(text)
            grown = tree.build_tree(self._run_index, target, way, self._question.depth)
        params = self._question.all_params
        return self._answer(
            {
                Format.TEXT: lambda: tree_text.render(grown, target, all_params=params),
                Format.JSON: lambda: {"target": _target_json(target), **tree.as_json(grown)},
                Format.MERMAID: lambda: drawing.mermaid(drawing.draw(grown)),
                Format.DOT: lambda: drawing.dot(drawing.draw(grown)),
                Format.HTML: lambda: _page().tree_page(grown, target, self._run_index.notes),
            }
        )

    def diff(self, one: str, other: str) -> int:
        targets = [self._find(text) for text in (one, other)]
        stage_runs = [
            node.stage_run
            for target in targets
            for node in tree.build_tree(self._run_index, target, tree.Direction.UP).nodes.values()
            if node.stage_run
        ]
        if self._learn_jobs(stage_runs):
            targets = [self._find(text) for text in (one, other)]
        compared = compare.compare(self._run_index, *targets)
        changed = self._row_changes(targets) if self._question.rows else None
        limit = self._question.limit

        def text() -> str:
            from pipelines.lineage import compare_text, rows_text

            parts = [compare_text.render(compared, self._history)]
            if changed is not None:
                parts.append(rows_text.render_changes(changed, limit))
            return "\n\n".join(parts)

        def as_json() -> dict[str, Any]:
            found = {} if changed is None else {"rows": row_changes.changes_json(changed, limit)}
            return {**compare_json.as_json(compared), **found}

        self._answer(
            {
                Format.TEXT: text,
                Format.JSON: as_json,
                Format.MERMAID: lambda: drawing.mermaid(drawing.draw_comparison(compared)),
                Format.DOT: lambda: drawing.dot(drawing.draw_comparison(compared)),
                Format.HTML: lambda: _page().diff_page(
                    compared,
                    self._history,
                    None if changed is None else changed[:limit],
                    self._run_index.notes,
                ),
            }
        )
        return EQUAL if compared.equal else DIFFERENT

    def _row_changes(self, targets: Sequence[Target]) -> list[row_changes.RowChange]:
        sides = [self._rows(target) for target in targets]
        return row_changes.compare_rows(*sides)

    def _rows(self, target: Target) -> rows.Rows:
        if target.stage_run is None:
            raise LockstepError(f"{target.text} was given, not made: it has no rows of training")
        found = rows.rows_of(self._content, target.stage_run)
        self._run_index.notes += [n for n in found.notes if n not in self._run_index.notes]
        return found

    def _show_rows(self, target: Target) -> int:
        found = self._rows(target)
        shown, total = rows.select(found, self._question.prompt, self._question.limit)

        def text() -> str:
            from pipelines.lineage.rows_text import render_rows

            return render_rows(found, shown, total)

        return self._answer(
            {
                Format.TEXT: text,
                Format.JSON: lambda: rows.as_json(found, shown, total),
                Format.HTML: lambda: _page().rows_page(found, shown, total, self._run_index.notes),
            }
        )

    def _show_prompt(self, text: str) -> int:
        lock, name = self._resolver.revision(text)
        wanted = name.removeprefix(PROMPT)
        found = prompts.trace(self._content, self._run_index, wanted, lock)

        def render() -> str:
            from pipelines.lineage.rows_text import render_influence

            return render_influence(found)

        return self._answer(
            {
                Format.TEXT: render,
                Format.JSON: lambda: prompts.as_json(found),
                Format.HTML: lambda: _page().prompt_page(found, self._run_index.notes),
            }
        )

    def _find(self, text: str) -> Target:
        try:
            return self._resolver.find(text)
        except LockstepError:
            made = self._made_by_run(text)
            if made is None:
                raise
            self._run_index.add(made)
            return self._resolver.find(text)

    def _warn_of_changes(self, target: Target) -> None:
        """Say so where the workspace's file is not the one that is told about; if it is small."""
        artifact = target.artifact
        if artifact is None or target.lock is not self._run_index.workspace:
            return
        path = self._repository.root / artifact.path
        files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        small = sum(item.stat().st_size for item in files) <= LARGEST_LOOK
        if path.exists() and small and HashCache().of(path) != artifact.hash:
            self._run_index.notes.append(
                f"{artifact.path} in the workspace is not what dvc.lock records: this is about "
                "what is recorded; see `dvc status`"
            )

    def _made_by_run(self, text: str) -> StageRun | None:
        """What an MLflow run made that no record here knows."""
        is_id = len(text) == 32 and all(char in "0123456789abcdef" for char in text)
        return self._runs.stage_run(text) if is_id and self._question.ask_mlflow else None

    def _learn_jobs(self, stage_runs: Sequence[StageRun]) -> bool:
        """Ask a shared MLflow for the jobs that the ledger does not have."""
        unknown = [stage_run for stage_run in stage_runs if not stage_run.jobs]
        if not unknown or not self._runs.is_shared or not self._question.ask_mlflow:
            return False
        jobs = self._runs.jobs(unknown)
        if jobs:
            self._use(self._run_index.with_jobs(jobs))
        return bool(jobs)

    def _answer(self, forms: dict[Format, Callable[[], Any]]) -> int:
        wanted = self._question.format
        if wanted not in forms:
            known = ", ".join(forms)
            raise LockstepError(f"this answer is no graph: --format {wanted} is not one of {known}")
        answer = forms[wanted]()
        if wanted is Format.JSON:
            answer = json.dumps({**answer, "notes": self._run_index.notes}, indent=2, default=str)
        for note in self._run_index.notes:
            print(f"lockstep: {note}", file=sys.stderr)
        if self._question.output:
            atomic.write_text(Path(self._question.output), answer.rstrip("\n") + "\n")
        else:
            print(answer.rstrip("\n"))
        return 0


def _target_json(target: Target) -> dict[str, Any]:
    found_in = target.lock.name if target.lock else ("ledger" if target.stage_run else None)
    return {**target.as_json(), "found_in": found_in}


def _page() -> Any:
    """Imported late: only a page needs the report's drawing."""
    from pipelines.lineage import page

    return page
