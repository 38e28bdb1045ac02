"""A draft as the text of slurm_profiles/NAME.yaml: every value with its reason beside it."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.survey.draft import Draft, Setting
from pipelines.survey.values import Cluster

WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z][\w.-]*|\d+[KMGT]")
_NOT_TEXT = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def profile_text(draft: Draft, head: str) -> str:
    lines = list(_comment(head))
    for remark in draft.remarks:
        lines += _comment(remark)
    lines += [f"description: {_quoted(draft.description)}", "executor: slurm"]
    lines += _settings(draft.top, "")
    lines.append("defaults:")
    lines += _settings(draft.defaults, "  ")
    if draft.stages:
        lines.append("stages:")
    for stage, settings in draft.stages.items():
        lines.append(f"  {stage}:")
        lines += _settings(settings, "    ")
    return "\n".join(lines) + "\n"


def _settings(settings: Iterable[Setting], indent: str) -> Iterator[str]:
    for each in settings:
        line = f"{indent}{'# ' if each.is_advice else ''}{each.key}: {_value(each)}"
        reason = f"  # {each.why}" if each.why else ""
        if len(line + reason) <= WIDTH:
            yield line + reason
            continue
        yield from _comment(each.why, indent)
        yield line


def _comment(text: str, indent: str = "") -> Iterator[str]:
    """A line that is indented, as those of a table are, is not joined with others."""
    for line in text.splitlines():
        inner = re.match(r" *", line)
        deeper = f"{indent}# {inner[0] if inner else ''}    "
        yield from textwrap.wrap(
            line,
            WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=deeper if line.startswith(" ") else f"{indent}# ",
            drop_whitespace=True,
            break_on_hyphens=False,
        )


def _value(setting: Setting) -> str:
    if setting.value is None:
        return "null"
    if isinstance(setting.value, bool):
        return str(setting.value).lower()
    if isinstance(setting.value, str) and not setting.is_advice:
        return _quoted(setting.value)
    return str(setting.value)


def _quoted(text: str) -> str:
    """YAML takes `on`, `12` or `1e3` for something else than text."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if plain else "'" + text.replace("'", "''") + "'"


def head(cluster: Cluster, name: str) -> str:
    """What the file is, in its first lines."""
    version = cluster.settings.version
    where = f"cluster {cluster.settings.cluster}" + (f", Slurm {version}" if version else "")
    return (
        f"From what Slurm said ({where}) to `lockstep profile init`. Each value has its reason; "
        f"where you know better, change it. Then: `lockstep doctor`, with LOCKSTEP_PROFILE={name}."
    )


def destination(root: Path, name: str, *, force: bool) -> Path:
    """Where the profile goes; refused if there is one, before anything is asked."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
        raise LockstepError(f"{name!r} is no name of a profile: use letters, digits, `-`, `_`, `.`")
    path = root / "slurm_profiles" / f"{name}.yaml"
    if path.exists() and not force:
        raise LockstepError(
            f"slurm_profiles/{name}.yaml exists: choose another name (`lockstep profile init "
            "NAME`), replace it by --force, or only look by --stdout"
        )
    return path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    atomic.write_text(path, text)
