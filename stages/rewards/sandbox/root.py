"""The file system that a program sees: an empty one, with a Python in it.

The root is a read-only tmpfs of our own. Bound into it, read-only: the interpreter, its standard
library and the system's shared libraries; no site-packages, no /usr/bin, no /etc, no /proc, no
/sys; in /dev null and urandom. `HOME` is the one place to write in: memory, limited in size.
"""

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stages.rewards.sandbox import linux

PROJECT = Path(__file__).resolve().parents[3]
# Not zero: to map it is to have memory that no process has.
_DEVICES = ("/dev/null", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_NEW = "/sys"
"""Where the new root is put together: a folder that exists everywhere and holds no interpreter."""
_KEPT = {
    os.ST_NOSUID: linux.MS_NOSUID,
    os.ST_NODEV: linux.MS_NODEV,
    os.ST_NOEXEC: linux.MS_NOEXEC,
    os.ST_NOATIME: linux.MS_NOATIME,
    os.ST_NODIRATIME: linux.MS_NODIRATIME,
    os.ST_RELATIME: linux.MS_RELATIME,
}
"""What a mount says of itself; an ordinary user may not take these away by mounting it again."""


def interpreter() -> str:
    """The Python itself, not that of a virtual environment."""
    base = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return os.path.realpath(base if os.path.exists(base) else sys.executable)


HOME = "/var/tmp" if interpreter().startswith("/tmp/") else "/tmp"
"""Never above the interpreter, which it would hide."""


def python() -> list[str]:
    """It reads the environment, which is ours, and has no packages."""
    return [interpreter(), "-P", "-s", "-S", "-B"]


def calling(function: str) -> str:
    """A program that calls this function of launcher.py with its arguments, which are numbers."""
    place = "from stages.rewards.sandbox import launcher"
    return f"import sys\n{place}\nlauncher.{function}(*map(int, sys.argv[1:]))\n"


def python_calling(function: str) -> list[str]:
    """The command for it, outside: there the project is where it is."""
    return [*python(), "-c", f"import sys\nsys.path[:0] = [{str(PROJECT)!r}]\n{calling(function)}"]


def environment() -> dict[str, str]:
    """All that a program learns of its surroundings; one line of it makes set orders repeat."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "LD_LIBRARY_PATH": library_folder(),
    }


def library_folder() -> str:
    """Where the interpreter has its standard library, and libpython if it needs one."""
    return os.path.dirname(os.path.dirname(interpreter())) + "/lib"


@functools.cache
def bound_paths() -> list[str]:
    """What a program sees of this machine's files, but for `package_folders`."""
    library = library_folder()
    paths = [*_LIBRARIES, *_DEVICES, library, f"{library}64", interpreter()]
    return [path for path in dict.fromkeys(paths) if os.path.lexists(path)]


@functools.cache
def package_folders() -> list[str]:
    """Installed packages inside what is bound: this project may be among them."""
    folders = [path for path in bound_paths() if os.path.isdir(path) and not os.path.islink(path)]
    candidates = [
        f"{folder}/{python}/{packages}"
        for folder in folders
        for python in sorted(os.listdir(folder))
        for packages in ("site-packages", "dist-packages")
        if python.startswith("python")
    ]
    return [path for path in candidates if os.path.isdir(path)]


def enter(files: Mapping[str, bytes], file_mb: int, owner: int) -> int:
    """Make the new root and move into it; the old one is gone.

    Returns a folder descriptor of /proc, which nobody else can find.
    """
    os.umask(0o022)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", _NEW, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    hidden = package_folders()
    for path in bound_paths():
        _bind(path)
    for folder in hidden:
        linux.mount("tmpfs", _NEW + folder, "tmpfs", linux.MS_NOSUID, "size=4k,mode=755")
    for folder in ("/proc", HOME):
        os.makedirs(_NEW + folder)
    for point in _mount_points(_NEW):
        _make_read_only(point)
    kind = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", _NEW + HOME, "tmpfs", kind, f"size={file_mb}m,nr_inodes=4096,mode=700")
    # Before the old /proc is out of sight: without one, the kernel gives an ordinary user no other.
    linux.mount("proc", f"{_NEW}/proc", "proc", kind | linux.MS_NOEXEC)
    proc = os.open(f"{_NEW}/proc", os.O_RDONLY | os.O_DIRECTORY)
    linux.detach(f"{_NEW}/proc")
    os.chdir(_NEW)
    linux.pivot_root(".", ".")
    linux.detach(".")
    os.chdir(HOME)
    write_files(files)
    for path in (HOME, *files):
        os.chown(path, owner, owner)
    return proc


def write_files(files: Mapping[str, bytes]) -> None:
    """Into the current folder."""
    for name, content in files.items():
        Path(name).write_bytes(content)


def _bind(path: str) -> None:
    target = _NEW + path
    if os.path.lexists(target):
        # Inside something that is bound already.
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)


def _make_read_only(point: str) -> None:
    mount_flags = os.statvfs(point).f_flag
    kept = sum(flag for word, flag in _KEPT.items() if mount_flags & word)
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | kept
    linux.mount(None, point, None, flags)


def _mount_points(root: str) -> list[str]:
    """The mount at `root` that was made last, and all below it; not those that it hides."""
    points: dict[bytes, str] = {}
    with open("/proc/self/mountinfo", "rb") as file:
        lines = file.readlines()
    for number, parent, _, _, escaped, *_ in (line.split(b" ") for line in lines):
        # Bytes, of which spaces and the like are written as octal numbers.
        point = os.fsdecode(escaped.decode("unicode_escape").encode("latin-1"))
        if point == root:
            points = {number: point}
        elif parent in points:
            points[number] = point
    return list(points.values())
