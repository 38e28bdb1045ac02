"""System calls, most of them such as Python 3.11 has no function for; an OSError names the call."""

import contextlib
import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
_MNT_DETACH = 2

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _text(value: str | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    done = _libc.mount(
        _text(source), _text(target), _text(kind), ctypes.c_ulong(flags), _text(options)
    )
    _check(done, f"mount {kind or source or ''} on {target}")


def detach(target: str) -> None:
    _check(_libc.umount2(_text(target), _MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(ctypes.c_long(number), _text(new), _text(old)), "pivot_root")


def _prctl(option: int, *values: object) -> int:
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    return int(_libc.prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words))))


def die_with_parent() -> None:
    _check(_prctl(_PR_SET_PDEATHSIG, 9), "die with the parent")


def hide_from_debuggers() -> None:
    """Nobody but root may trace this process or look into its part of /proc."""
    _check(_prctl(_PR_SET_DUMPABLE, 0), "not dumpable")


def no_new_privileges() -> None:
    """Set-uid programs and file capabilities give nothing to this process and its children."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "no new privileges")


def set_host_name(name: str) -> None:
    _check(_libc.sethostname(_text(name), ctypes.c_size_t(len(name))), "sethostname")


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_capabilities() -> None:
    """Give up every capability, and the chance to get one back."""
    capability = 0
    while _prctl(_PR_CAPBSET_READ, capability) >= 0:
        # Refused to those who have none to give up: they cannot get one back either.
        _prctl(_PR_CAPBSET_DROP, capability)
        capability += 1
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_system_calls(bpf: bytes) -> None:
    """Install a seccomp filter; needs no_new_privileges."""
    program = _BpfProgram(len(bpf) // 8, bpf)
    done = _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
    _check(done, "seccomp")


def reap(child: int | None = None) -> int | None:
    """Wait for the children that have ended; the wait status of `child`, if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status
