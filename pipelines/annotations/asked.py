"""What a prompt asked, as messages: rollouts and evaluations keep its text, for people to read.

One question of a user is its text. Any other dialogue is looked up in the data that `prepare`
reads, by its id, which is that of all it holds; where the data have changed since, it is not found.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.config.params import load_params
from pipelines.lineage.content import NEEDS_PYARROW
from stages.contracts.sources import Role
from stages.data.seeds import content_id

Asked = tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]
"""Messages, and the tools that they offer."""
_ASKING = (Role.PROMPTS, Role.HELD_OUT, Role.DEMONSTRATIONS)


def asked(root: Path, prompts: Mapping[str, str]) -> dict[str, Asked]:
    """What each prompt, an id with its text, asked; those that are not found are left out."""
    found: dict[str, Asked] = {
        prompt_id: (({"role": "user", "content": text},), ())
        for prompt_id, text in prompts.items()
        if content_id(text) == prompt_id
    }
    missing = prompts.keys() - found.keys()
    for prompt_id, dialogue in _dialogues(root) if missing else ():
        if prompt_id in missing:
            found[prompt_id] = dialogue
            missing.remove(prompt_id)
            if not missing:
                break
    return found


def _dialogues(root: Path) -> Iterator[tuple[str, Asked]]:
    """The prompts of the data, as they are read."""
    params = load_params(root).prepare
    if params.source != "files":
        return
    try:
        from stages.context import StageError
        from stages.data.sources import read, sources_of
        from stages.data.tally import RowCounts
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise LockstepError(NEEDS_PYARROW) from None
    try:
        sources = sources_of(params, root / params.folder)
        for role in _ASKING:
            for opened in sources[role]:
                for item in read(opened, role, params, RowCounts(role, opened.label)):
                    yield item.prompt.id, (item.prompt.messages, item.prompt.tools)
    except StageError as error:
        raise LockstepError(f"the data of `prepare` cannot be read: {error}") from None
