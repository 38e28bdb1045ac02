"""A seccomp filter: the system calls that no honest program of ours makes.

The namespaces already leave these calls little to reach. The filter takes away kernel surface
(bpf, io_uring, keyrings, new namespaces), memory and CPU time that no other limit counts (memfd,
System V, pages that only a pipe or a shared mapping holds, children that nobody buries), and ways
to disturb the supervisor, which for an ordinary user has the program's own uid. A refused call
fails with EPERM; a call from a foreign ABI, whose numbers mean something else, ends the process.
"""

import errno
import functools
import os
import struct

_NUMBERS = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32_BIT = 0x40000000

# name: its number on x86_64 and on aarch64; None where it does not exist. From 424 on they agree.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # looking into other processes, and acting on them
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    # other views of the system
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # memory that belongs to no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    # parts of the kernel with a history
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_PRLIMIT, _SETRLIMIT = (302, 261), (160, 164)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_MMAP, _SETSOCKOPT, _SIGACTION = (9, 222), (54, 208), (13, 134)

_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1
_SHARED_BY_NOBODY = 0x21
"""MAP_SHARED and MAP_ANONYMOUS: pages stay when no process has them in its tables any more."""
_SOL_SOCKET, _SO_SNDBUF = 1, 7
_SIGCHLD = 17
_RLIMIT_CORE = 4

# A step of classic BPF: what it does, where it jumps if true and if false, and its operand.
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_GE, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN_CALL = 0x00050000 | errno.ENOSYS


_STEP_BYTES = 8


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _answer(number: int, answer: int) -> bytes:
    """`answer` to this call; go on with any other."""
    return _step(_JUMP_IF_EQUAL, number, 0, 1) + _step(_RETURN, answer)


def _look_at_argument(number: int, test: bytes) -> bytes:
    """Refuse this call unless `test` of its first argument skips the refusal."""
    return _look(number, _load(0) + test + _step(_RETURN, _REFUSE))


def _look(number: int, steps: bytes) -> bytes:
    """For this call alone: these steps, and where they come to their end, it is allowed."""
    return (
        _step(_JUMP_IF_EQUAL, number, 0, len(steps) // _STEP_BYTES + 1)
        + steps
        + _step(_RETURN, _ALLOW)
    )


def _load(argument: int, *, upper_half: bool = False) -> bytes:
    """Half of an argument; both machines have the lower half first."""
    return _step(_LOAD, _ARGUMENTS_AT + 8 * argument + 4 * upper_half)


def _refuse_unless_null(argument: int) -> bytes:
    """Five steps: a pointer to nothing only asks."""
    return (
        _load(argument)
        + _step(_JUMP_IF_EQUAL, 0, 0, 2)
        + _load(argument, upper_half=True)
        + _step(_JUMP_IF_EQUAL, 0, 1, 0)
        + _step(_RETURN, _REFUSE)
    )


def filter_for(machine: str) -> bytes:
    """The filter, as the kernel reads it."""
    if machine not in _NUMBERS:
        raise OSError(errno.ENOSYS, f"no seccomp filter is written for {machine} machines")
    here = _NUMBERS[machine]
    steps = _step(_LOAD, _ARCH_AT) + _step(_JUMP_IF_EQUAL, _AUDIT_ARCH[here], 1, 0)
    steps += _step(_RETURN, _KILL) + _step(_LOAD, _NUMBER_AT)
    if machine == "x86_64":
        steps += _step(_JUMP_IF_GE, _X32_BIT, 0, 1) + _step(_RETURN, _KILL)
    for numbers in _REFUSED.values():
        if (number := numbers[here]) is not None:
            steps += _answer(number, _REFUSE)
    refuse = _step(_RETURN, _REFUSE)
    # Its flags lie in memory, where a filter cannot look; the C library then falls back to clone.
    steps += _answer(_CLONE3[here], _UNKNOWN_CALL)
    steps += _look_at_argument(_CLONE[here], _step(_JUMP_IF_ANY_BIT, _NEW_NAMESPACES, 0, 1))
    # The process itself is 0: its own limits it may lower, but for the one that keeps its core from
    # whatever of the host's takes cores.
    steps += _look(
        _PRLIMIT[here],
        _load(0)
        + _step(_JUMP_IF_EQUAL, 0, 0, 6)
        + _load(1)
        + _step(_JUMP_IF_EQUAL, _RLIMIT_CORE, 0, 5)
        + _refuse_unless_null(2),
    )
    steps += _look(_SETRLIMIT[here], _load(0) + _step(_JUMP_IF_EQUAL, _RLIMIT_CORE, 0, 1) + refuse)
    for call in (_SOCKET, _SOCKETPAIR):
        steps += _look_at_argument(call[here], _step(_JUMP_IF_EQUAL, _AF_UNIX, 1, 0))
    steps += _look(
        _MMAP[here],
        _load(3)
        + _step(_AND, _SHARED_BY_NOBODY)
        + _step(_JUMP_IF_EQUAL, _SHARED_BY_NOBODY, 0, 1)
        + refuse,
    )
    # What lies in a socket is in no process's memory: not more of it than by default.
    steps += _look(
        _SETSOCKOPT[here],
        _load(1)
        + _step(_JUMP_IF_EQUAL, _SOL_SOCKET, 0, 3)
        + _load(2)
        + _step(_JUMP_IF_EQUAL, _SO_SNDBUF, 0, 1)
        + refuse,
    )
    # Children of a process that ignores their end vanish with the CPU time that they took. To ask
    # what is set, with no new action, is allowed: Python does so when it starts.
    steps += _look(
        _SIGACTION[here], _load(0) + _step(_JUMP_IF_EQUAL, _SIGCHLD, 0, 5) + _refuse_unless_null(1)
    )
    return steps + _step(_RETURN, _ALLOW)


@functools.cache
def filter_here() -> bytes:
    return filter_for(os.uname().machine)
