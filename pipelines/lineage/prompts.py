"""From a prompt to every model that it influenced.

Directly: a model whose training rows have the prompt. Through an ancestor: a model that starts from
such a model, samples from it, or is scored by it. What was only sampled, or held out to evaluate,
is told apart. A file that is gone cannot be searched, and is named.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import Content, Gone
from pipelines.lineage.evidence import Artifact, Evidence
from pipelines.lineage.making import Lock, Making
from pipelines.lineage.naming import role_of
from pipelines.lineage.rows import training_file
from stages.data.seeds import content_id

SHORTEST_PREFIX = 4
_MOST = 8
_MODEL = "model"
_COLUMNS = ("prompt_id", "prompt")


@dataclass(frozen=True)
class Touched:
    """A model that the prompt had a part in."""

    making: Making
    rows: int
    """How many rows of its training had the prompt; 0 where only an ancestor's had."""
    through: tuple[str, ...]
    """The stages from the ancestor to it."""

    @property
    def model(self) -> Artifact | None:
        for path, digest in self.making.outs.items():
            if role_of(self.making.stage, path, among_inputs=False) == _MODEL:
                return Artifact(path, digest)
        return None


@dataclass
class Influence:
    """All that a prompt did."""

    prompt_id: str
    prompt: str
    direct: list[Touched] = field(default_factory=list)
    indirect: list[Touched] = field(default_factory=list)
    sampled: list[Making] = field(default_factory=list)
    """Rollouts that have it, for updates that did not train on it."""
    evaluated: list[Making] = field(default_factory=list)
    gone: list[tuple[Making, Artifact]] = field(default_factory=list)


def trace(content: Content, evidence: Evidence, wanted: str, lock: Lock | None) -> Influence:
    """Follow a prompt, given by id, prefix or text, through one lock or through everything."""
    makings = list(lock.stages.values()) if lock else evidence.makings
    search = _Search(content)
    learners = [(making, file) for making in makings if (file := training_file(making))]
    sampling = [(making, item) for making in makings for item in _made(making, "rollouts")]
    evaluating = [(making, item) for making in makings for item in _read(making, "held_out")]
    prepared = [
        (making, item) for making in makings for item in _made(making, "prompts", "demonstrations")
    ]
    files = [item for _, item in (*learners, *sampling, *evaluating, *prepared)]
    prompt_id = _identify(wanted, [search.prompts(item) for item in dict.fromkeys(files)])
    influence = Influence(prompt_id, search.text_of(prompt_id))
    for making, file in learners:
        count = search.count(file, prompt_id)
        if count is None:
            influence.gone.append((making, file))
        elif count:
            influence.direct.append(Touched(making, count, ()))
    influence.indirect = _descendants(evidence, [touched.making for touched in influence.direct])
    if lock is not None:
        inside = {id(making) for making in makings}
        influence.indirect = [item for item in influence.indirect if id(item.making) in inside]
    trained = {touched.making.key for touched in influence.direct}
    influence.sampled = [
        making
        for making, file in sampling
        if search.count(file, prompt_id) and making.key not in trained
    ]
    influence.evaluated = [making for making, file in evaluating if search.count(file, prompt_id)]
    return influence


class _Search:
    """Prompts by file; each file is read once."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._known: dict[str, dict[str, tuple[int, str]] | None] = {}

    def prompts(self, artifact: Artifact) -> dict[str, tuple[int, str]]:
        """Each prompt's id, how often the file has it, and its text; nothing if it is gone."""
        if artifact.hash not in self._known:
            try:
                found: dict[str, tuple[int, str]] = {}
                for row in self._content.rows(artifact, _COLUMNS):
                    count = found.get(row["prompt_id"], (0, ""))[0]
                    found[row["prompt_id"]] = (count + 1, row.get("prompt") or "")
                self._known[artifact.hash] = found
            except Gone:
                self._known[artifact.hash] = None
        return self._known[artifact.hash] or {}

    def count(self, artifact: Artifact, prompt_id: str) -> int | None:
        """How many rows have the prompt; None where the file is gone."""
        found = self.prompts(artifact)
        if self._known[artifact.hash] is None:
            return None
        return found.get(prompt_id, (0, ""))[0]

    def text_of(self, prompt_id: str) -> str:
        texts = (
            found[prompt_id][1] for found in self._known.values() if found and prompt_id in found
        )
        return next((text for text in texts if text), "")


def _identify(wanted: str, known: Sequence[dict[str, tuple[int, str]]]) -> str:
    """The id of the prompt that is meant."""
    texts: dict[str, str] = {}
    for found in known:
        for prompt_id, (_, text) in found.items():
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
            f"prompt:{wanted}: {len(matching)} prompts have an id that begins so:{listed}"
        )
    raise LockstepError(
        f"prompt:{wanted}: no such prompt; give an id, at least {SHORTEST_PREFIX} characters of "
        f"one, or the exact text. There are, among {len(texts)}:{listed}"
    )


def _descendants(evidence: Evidence, origins: Sequence[Making]) -> list[Touched]:
    """The models below, each with a shortest way to it; the origins themselves are left out."""
    came_from: dict[int, tuple[str, ...]] = {id(making): () for making in origins}
    queue = deque(origins)
    found = []
    while queue:
        making = queue.popleft()
        way = came_from[id(making)]
        for path, digest in making.outs.items():
            for reader in evidence.readers(Artifact(path, digest)):
                if id(reader) in came_from:
                    continue
                came_from[id(reader)] = (*way, making.stage)
                queue.append(reader)
                if training_file(reader):
                    found.append(Touched(reader, 0, came_from[id(reader)]))
    return found


def _made(making: Making, *names: str) -> list[Artifact]:
    return _called(making, making.outs.items(), names, among_inputs=False)


def _read(making: Making, *names: str) -> list[Artifact]:
    return _called(making, making.inputs.items(), names, among_inputs=True)


def _called(
    making: Making, items: Any, names: Sequence[str], *, among_inputs: bool
) -> list[Artifact]:
    return [
        Artifact(path, digest)
        for path, digest in items
        if role_of(making.stage, path, among_inputs=among_inputs) in names
    ]


def as_json(influence: Influence) -> dict[str, Any]:
    """The shape that docs/lineage.md describes."""

    def touched(item: Touched) -> dict[str, Any]:
        model = item.model
        return {
            "stage": item.making.stage,
            "id": item.making.id,
            "path": model.path if model else None,
            "hash": model.hash if model else None,
            "rows": item.rows,
            "through": list(item.through),
            "in_workspace": item.making.in_workspace,
            "recorded_in": list(item.making.commits),
        }

    return {
        "prompt_id": influence.prompt_id,
        "prompt": influence.prompt,
        "direct": [touched(item) for item in influence.direct],
        "through_an_ancestor": [touched(item) for item in influence.indirect],
        "sampled_only": [{"stage": item.stage, "id": item.id} for item in influence.sampled],
        "evaluated_on": [{"stage": item.stage, "id": item.id} for item in influence.evaluated],
        "gone": [
            {"stage": making.stage, "id": making.id, **vars(item)}
            for making, item in influence.gone
        ],
    }
