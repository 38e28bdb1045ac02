"""From a prompt to every model that it influenced.

Directly: a model whose training rows have the prompt. Through an ancestor: a model that starts from
such a model, samples from it, or is scored by it. Prompts that were only sampled or only used for
evaluation are listed separately. A missing file cannot be searched, and is named.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content, MissingArtifact
from pipelines.lineage.rows import training_file
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import Lock, StageRun
from stages.data.seeds import content_id

SHORTEST_PREFIX = 4
_MOST = 8
_COLUMNS = ("prompt_id", "prompt")


@dataclass(frozen=True)
class AffectedModel:
    """A model that the prompt influenced."""

    stage_run: StageRun
    rows: int
    """How many of its training rows had the prompt; 0 where only an ancestor's had."""
    through: tuple[str, ...]
    """The stages from the ancestor to it."""

    @property
    def model(self) -> Artifact | None:
        return self.stage_run.artifact("model", among_inputs=False)


@dataclass
class Influence:
    """Everything that a prompt influenced."""

    prompt_id: str
    prompt: str
    direct: list[AffectedModel] = field(default_factory=list)
    indirect: list[AffectedModel] = field(default_factory=list)
    sampled: list[StageRun] = field(default_factory=list)
    """Rollouts that have it, for updates that did not train on it."""
    evaluated: list[StageRun] = field(default_factory=list)
    gone: list[tuple[StageRun, Artifact]] = field(default_factory=list)


def trace(content: Content, run_index: RunIndex, wanted: str, lock: Lock | None) -> Influence:
    """Follow a prompt, given by id, prefix or text, through one lock or through everything."""
    stage_runs = list(lock.stages.values()) if lock else run_index.stage_runs
    search = _Search(content)
    learners = [(stage_run, file) for stage_run in stage_runs if (file := training_file(stage_run))]
    sampling = _with(stage_runs, "rollouts", among_inputs=False)
    evaluating = _with(stage_runs, "held_out", among_inputs=True)
    prompts = _with(stage_runs, "prompts", among_inputs=False)
    demonstrations = _with(stage_runs, "demonstrations", among_inputs=False)
    files = [file for _, file in (*learners, *sampling, *evaluating, *prompts, *demonstrations)]
    prompt_id = _identify(wanted, search, list(dict.fromkeys(files)))
    influence = Influence(prompt_id, search.text_of(files, prompt_id))
    for stage_run, file in learners:
        count = search.count(file, prompt_id)
        if count is None:
            influence.gone.append((stage_run, file))
        elif count:
            influence.direct.append(AffectedModel(stage_run, count, ()))
    descendants = _descendants(run_index, [item.stage_run for item in influence.direct])
    inside = set(stage_runs)
    influence.indirect = [item for item in descendants if item.stage_run in inside]
    trained = {item.stage_run.key for item in influence.direct}
    influence.sampled = [
        stage_run
        for stage_run, file in sampling
        if search.count(file, prompt_id) and stage_run.key not in trained
    ]
    influence.evaluated = [
        stage_run for stage_run, file in evaluating if search.count(file, prompt_id)
    ]
    return influence


class _Search:
    """Prompts by file. Of a file that was not read as a whole, one prompt's rows are looked up."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._known: dict[str, dict[str, tuple[int, str]] | None] = {}
        self._looked_up: dict[tuple[str, str], tuple[int, str] | None] = {}

    def prompts(self, artifact: Artifact) -> dict[str, tuple[int, str]]:
        """Each prompt's id, how often the file has it, and its text; empty if it is missing."""
        if artifact.hash not in self._known:
            try:
                counted: dict[str, tuple[int, str]] = {}
                for row in self._content.rows(artifact, _COLUMNS):
                    count = counted.get(row["prompt_id"], (0, ""))[0]
                    counted[row["prompt_id"]] = (count + 1, row.get("prompt") or "")
                self._known[artifact.hash] = counted
            except MissingArtifact:
                self._known[artifact.hash] = None
        return self._known[artifact.hash] or {}

    def count(self, artifact: Artifact, prompt_id: str) -> int | None:
        """How many rows have the prompt; None where the file is missing."""
        found = self._look_up(artifact, prompt_id)
        return None if found is None else found[0]

    def _look_up(self, artifact: Artifact, prompt_id: str) -> tuple[int, str] | None:
        if artifact.hash in self._known:
            prompts = self._known[artifact.hash]
            return None if prompts is None else prompts.get(prompt_id, (0, ""))
        key = artifact.hash, prompt_id
        if key not in self._looked_up:
            try:
                self._looked_up[key] = self._content.occurrences(artifact, prompt_id)
            except MissingArtifact:
                self._looked_up[key] = None
        return self._looked_up[key]

    def text_of(self, files: Iterable[Artifact], prompt_id: str) -> str:
        found = (self._look_up(artifact, prompt_id) for artifact in files)
        return next((each[1] for each in found if each and each[1]), "")


def _identify(wanted: str, search: _Search, files: Sequence[Artifact]) -> str:
    """The prompt's id, from an id, a prefix or a text."""
    if len(wanted) == len(content_id("")) and any(search.count(file, wanted) for file in files):
        return wanted
    texts: dict[str, str] = {}
    for file in files:
        for prompt_id, (_, text) in search.prompts(file).items():
            texts[prompt_id] = texts.get(prompt_id) or text
    if wanted in texts:
        return wanted
    if content_id(wanted) in texts:
        return content_id(wanted)
    spelt = [prompt_id for prompt_id, text in texts.items() if text == wanted]
    if len(spelt) == 1:  # a dialogue, whose id is not that of its text
        return spelt[0]
    begins = wanted if len(wanted) >= SHORTEST_PREFIX else "\0"
    matching = sorted(prompt_id for prompt_id in texts if prompt_id.startswith(begins))
    if len(matching) == 1:
        return matching[0]
    if not texts:
        raise LockstepError("no file with prompts is left in the workspace or in DVC's cache")
    contained = sorted(p for p, text in texts.items() if wanted and wanted in text)
    listed = "".join(
        f"\n  {p}  {texts[p]!r}" for p in (matching or contained or list(texts))[:_MOST]
    )
    if matching:
        raise LockstepError(
            f"prompt:{wanted}: {len(matching)} prompts have an id with this prefix:{listed}"
        )
    raise LockstepError(
        f"prompt:{wanted}: no such prompt; give an id, at least {SHORTEST_PREFIX} characters of "
        f"one, or the exact text. Some of the {len(texts)} known prompts:{listed}"
    )


def _descendants(run_index: RunIndex, origins: Sequence[StageRun]) -> list[AffectedModel]:
    """The models downstream, each with a shortest path to it, without the origins themselves."""
    routes: dict[StageRun, tuple[str, ...]] = dict.fromkeys(origins, ())
    queue = deque(origins)
    affected = []
    while queue:
        stage_run = queue.popleft()
        for path, digest in stage_run.outs.items():
            for reader in run_index.readers(Artifact(path, digest)):
                if reader in routes:
                    continue
                routes[reader] = (*routes[stage_run], stage_run.stage)
                queue.append(reader)
                if training_file(reader):
                    affected.append(AffectedModel(reader, 0, routes[reader]))
    return affected


def _with(
    stage_runs: Iterable[StageRun], role: str, *, among_inputs: bool
) -> list[tuple[StageRun, Artifact]]:
    """The stage runs that have such a file, with it."""
    files = ((item, item.artifact(role, among_inputs=among_inputs)) for item in stage_runs)
    return [(stage_run, file) for stage_run, file in files if file]


def as_json(influence: Influence) -> dict[str, Any]:
    """The shape that docs/lineage.md describes."""

    def touched(item: AffectedModel) -> dict[str, Any]:
        model = item.model
        return {
            "stage": item.stage_run.stage,
            "id": item.stage_run.id,
            "path": model.path if model else None,
            "hash": model.hash if model else None,
            "rows": item.rows,
            "through": list(item.through),
            "in_workspace": item.stage_run.in_workspace,
            "recorded_in": list(item.stage_run.commits),
        }

    return {
        "prompt_id": influence.prompt_id,
        "prompt": influence.prompt,
        "direct": [touched(item) for item in influence.direct],
        "through_an_ancestor": [touched(item) for item in influence.indirect],
        "sampled_only": [{"stage": item.stage, "id": item.id} for item in influence.sampled],
        "evaluated_on": [{"stage": item.stage, "id": item.id} for item in influence.evaluated],
        "gone": [
            {"stage": stage_run.stage, "id": stage_run.id, **vars(item)}
            for stage_run, item in influence.gone
        ],
    }
