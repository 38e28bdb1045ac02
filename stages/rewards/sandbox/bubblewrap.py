"""The same walls, put up by bubblewrap.

For machines where bubblewrap may make namespaces and we may not: it is set-uid root there, or
AppArmor lets it. It makes the namespaces and the root; the supervisor is its process 1, and reads
our code from a descriptor, since the project is not in there. One difference: the program sees the
/proc of its own namespace, which only the one who makes the root could hide. Not for root, whose
programs would be root's in the eyes of the kernel; root makes its own namespaces.
"""

import io
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from stages.rewards.sandbox.root import HOME, bound_paths, calling, package_folders, python
from stages.rewards.sandbox.values import SandboxBroken

_HERE = Path(__file__).resolve().parent


def code() -> int:
    """A descriptor of this package as a program that Python can run."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("__main__.py", calling("once"))
        for package in ("stages", "stages/rewards"):
            archive.writestr(f"{package}/__init__.py", "")
        for path in sorted(_HERE.glob("*.py")):
            archive.write(path, f"stages/rewards/sandbox/{path.name}")
    with tempfile.TemporaryFile() as file:
        file.write(content.getvalue())
        file.flush()
        return os.dup(file.fileno())


def command(code: int, file_mb: int, nobody: int) -> list[str]:
    """What starts the launcher inside; its arguments follow."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxBroken("bwrap is not installed")
    if os.geteuid() == 0:
        raise SandboxBroken("bubblewrap is not used by root")
    words = [bwrap, "--unshare-all", "--uid", str(nobody), "--gid", str(nobody)]
    # Not --die-with-parent: to the kernel, that is the thread that has started it. The launcher
    # ends with its caller by itself.
    words += ["--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL"]
    for path in bound_paths():
        if (link := Path(path)).is_symlink():
            words += ["--symlink", str(link.readlink()), path]
        else:
            words += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    for folder in package_folders():
        words += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    words += ["--proc", "/proc", "--perms", "0700", "--size", str(file_mb << 20), "--tmpfs", HOME]
    words += ["--remount-ro", "/", "--chdir", HOME]
    return [*words, *python(), f"/proc/self/fd/{code}"]
