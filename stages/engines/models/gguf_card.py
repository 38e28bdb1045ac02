"""The model card and the licence of a GGUF file: those beside it, or what the file itself tells.

Whoever exports a policy that began with the file finds there what the base model is called, and
under which licence it is.
"""

import json
import re
from pathlib import Path
from typing import Any

from stages.engines.models.given_folder import CARD, copy_files

_STATED = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "language": "general.languages",
}
"""What a card on the Hugging Face hub calls it, and the file."""
_SOURCES = ("general.source.repo_url", "general.repo_url")
_PARENT = "general.base_model.0"
_HUB = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+?)/?")


def take_card(file: Path, metadata: dict[str, Any], target: Path) -> None:
    """README.md and LICENSE* from beside the file; without a README.md, a small one is written."""
    copy_files(file.parent, target, CARD)
    readme = target / "README.md"
    if not readme.exists():
        readme.write_text(_card(file, metadata), encoding="utf-8")


def _card(file: Path, metadata: dict[str, Any]) -> str:
    name = _name(file, metadata)
    stated = {key: metadata[stated] for key, stated in _STATED.items() if metadata.get(stated)}
    values = {"base_model_name": name, **stated}
    # A text in JSON is one in YAML, whatever is in it.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    front = "\n".join(lines)
    return f"---\n{front}\n---\n\n# {name}\n\nWritten from what `{file.name}` says about itself.\n"


def _name(file: Path, metadata: dict[str, Any]) -> str:
    """What the hub calls the model, if the file knows; else what the file calls it."""
    name = str(metadata.get("general.name") or _composed(metadata) or file.stem)
    sources = [metadata.get(key) for key in _SOURCES]
    # A converter may name the model that was quantised as the file's base; any other base is an
    # older model, and not this one.
    if _letters(str(metadata.get(f"{_PARENT}.name"))) == _letters(name):
        sources.append(metadata.get(f"{_PARENT}.repo_url"))
    matches = (_HUB.fullmatch(str(source)) for source in sources)
    return next((match[1] for match in matches if match), " ".join(name.split()))


def _composed(metadata: dict[str, Any]) -> str:
    parts = (metadata.get(f"general.{part}") for part in ("basename", "size_label", "finetune"))
    return "-".join(str(part) for part in parts if part)


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
