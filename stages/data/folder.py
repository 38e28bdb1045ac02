"""The content of prepare.folder: files of rows, what may lie beside them, and the rest.

Without prepare.files a file goes by its name, so whatever is there has to be read. A held-out file
of a type that is not read would otherwise be passed over, and evaluation prompts would come from
the training prompts.
"""

from pathlib import Path

from stages.context import StageError
from stages.contracts.sources import TOOLS_SUFFIX, Role
from stages.data.formats.files import TYPES, file_type

_ABOUT_DATA = ("readme", "license", "licence", "copying", "notice", "citation", "changelog")
_PROSE = (".md", ".rst")


def files_by_role(folder: Path) -> dict[Role, list[Path]]:
    """The files of rows that are called after each role; StageError where something else is."""
    by_role: dict[Role, list[Path]] = {role: [] for role in Role}
    unread = []
    for path in entries(folder):
        role = role_of(path)
        if role is not None and path.is_file() and file_type(path):
            by_role[role].append(path)
        else:
            unread.append(f"{path.name} ({kind_of(path)})")
    roles = ", ".join(f"{role}.*" for role in Role)
    if unread:
        raise StageError(
            f"{folder} has what nothing reads: {', '.join(unread)}. Read are {roles}, of the types "
            f"{TYPES}. Rename or convert it, move it out of the folder, or name the files to read "
            "in prepare.files"
        )
    if not any(by_role.values()):
        raise StageError(
            f"{folder} has no data: prepare.source is 'files', which reads {roles} from it, of the "
            f"types {TYPES}. Add some of these files, or name others in prepare.files"
        )
    return by_role


def entries(folder: Path) -> list[Path]:
    """What lies in the folder but for hidden files and what is written about the data."""
    return sorted(path for path in folder.iterdir() if not _is_beside(path))


def role_of(path: Path) -> Role | None:
    """The role that something is called after."""
    stem = path.name.partition(".")[0]
    return next((role for role in Role if role == stem), None)


def kind_of(path: Path) -> str:
    """What is at a path, in words."""
    if path.is_dir():
        return "a folder"
    if path.suffix == ".dvc":
        return f"{path.stem} is not here: `dvc pull` brings it"
    if path.is_file():
        return f"of type {file_type(path) or ''.join(path.suffixes) or 'unknown'}"
    return "a link to nothing" if path.is_symlink() else "neither a file nor a folder"


def _is_beside(path: Path) -> bool:
    if path.name.startswith("."):
        return True
    if path.suffix == ".dvc":  # what `dvc add` writes beside a file; without it, it was not pulled
        return path.with_suffix("").exists()
    if path.name.endswith(TOOLS_SUFFIX) and role_of(path) is None:  # of prepare.tools
        return True
    about = path.name.partition(".")[0].lower() in _ABOUT_DATA or path.suffix.lower() in _PROSE
    return about and role_of(path) is None and not path.is_dir()
