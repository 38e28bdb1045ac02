"""Models that bring Python code of their own: run only where params.yaml has allowed it.

A folder's config may name classes of its own (`auto_map`), in Python files beside the weights. Such
code is refused when it comes from a user's folder, unless the params allow it. Where they do, the
copy gets a list of its files with their hashes, and so has every policy that is made from it: other
stages run exactly the code that was let in, and nothing else.
"""

import hashlib
import json
import shutil
from pathlib import Path

from stages.context import StageError
from stages.data.artifacts import write_json

ALLOWED = "allowed_code.json"
_NAMING = ("config.json", "tokenizer_config.json")


def named_code(folder: Path) -> list[str]:
    """The classes of their own that a folder's configs name, such as `modeling_x.XForCausalLM`."""
    named: set[str] = set()
    for name in _NAMING:
        if (folder / name).is_file():
            classes = json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map") or {}
            values = classes.values() if isinstance(classes, dict) else [classes]
            for value in values:
                of_kind = value if isinstance(value, list) else [value]
                named.update(each for each in of_kind if each)
    return sorted(named)


def check_code_is_there(folder: Path) -> None:
    """StageError where a class is named whose code would have to be fetched from elsewhere."""
    for name in named_code(folder):
        module = name.rsplit("--", 1)[-1].split(".", 1)[0]
        if "--" in name or not (folder / f"{module}.py").is_file():
            raise StageError(
                f"{folder}: its configs name the class {name}, whose code is not in the folder: "
                f"put {module}.py there, and write the name without what stands before '--'"
            )


def allow_code(source: Path, target: Path) -> None:
    """Take a folder's Python files along, and note which they are."""
    for path in sorted(source.glob("*.py")):
        shutil.copyfile(path, target / path.name)
    write_json(target / ALLOWED, _hashes(target))


def copy_code(source: Path, target: Path) -> None:
    """Take code along that was allowed before, for a model that was made from this one."""
    if (source / ALLOWED).is_file():
        for name in (ALLOWED, *_listed(source)):
            shutil.copyfile(source / name, target / name)


def may_run(folder: Path) -> bool:
    """Whether a folder's own code is to be loaded; StageError where it was never allowed."""
    if not named_code(folder):
        return False
    if not (folder / ALLOWED).is_file():
        raise StageError(refusal(folder))
    if _listed(folder) != _hashes(folder):
        raise StageError(
            f"{folder}: its Python files are not those that {ALLOWED} lists: the code was changed "
            "after it was let in"
        )
    return True


def check_same_code(folder: Path, policy: Path) -> None:
    """StageError where a given model brings code that the policy, whose code is allowed, has not.

    A given folder may bring any list of allowed files; only the one that prepare made counts.
    """
    if named_code(folder) and (not may_run(policy) or _hashes(folder) != _listed(policy)):
        raise StageError(
            f"{folder} can only be loaded by running code of its own, other than the policy's "
            f"({', '.join(named_code(folder))}): only a base model may bring code"
        )


def refusal(folder: Path, param: str = "model.trust_remote_code") -> str:
    """What is wrong with a folder whose code nobody has allowed."""
    return (
        f"{folder} can only be loaded by running code that comes with it "
        f"({', '.join(named_code(folder))}): read that code, and set {param}: true if you trust it"
    )


def _listed(folder: Path) -> dict[str, str]:
    listed: dict[str, str] = json.loads((folder / ALLOWED).read_text(encoding="utf-8"))
    return listed


def _hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.py"))
    }
