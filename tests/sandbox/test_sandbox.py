"""What a program gets and what comes back; and what happens where there is no isolation."""

import contextlib
import errno
import hashlib
import os
import resource
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.root import interpreter
from stages.rewards.sandbox.run import run_program
from stages.rewards.sandbox.seccomp import filter_for
from stages.rewards.sandbox.supervisor import _usage
from stages.rewards.sandbox.values import (
    IsolationKind,
    Limits,
    ProgramResult,
    SandboxBroken,
    Status,
)
from tests.sandbox.attack import below, survivors
from tests.waiting import TIMEOUT_S, until

ROOT = Path(__file__).resolve().parents[2]
KIND = isolation().kind
needs_isolation = pytest.mark.skipif(KIND is IsolationKind.NONE, reason=isolation().detail)


def _kernel_gives_namespaces() -> bool:
    """Asked without any code of the sandbox."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _kernel_gives_namespaces(), reason="the kernel gives no namespaces here")
def test_where_the_kernel_has_all_it_needs_there_is_isolation() -> None:
    """All other tests are skipped without isolation, so a sandbox that broke would pass them."""
    assert KIND is not IsolationKind.NONE, isolation().detail


@needs_isolation
def test_a_program_reads_its_input_and_its_files_and_says_what_it_likes() -> None:
    program = """
import sys
print(input().upper(), open("data").read(), sys.stdin.read(), end="")
print("oops", file=sys.stderr)
sys.exit(3)"""
    done = run_program(program, "one\ntwo", {"data": b"file"}, kind=KIND)
    assert done == ProgramResult(Status.FINISHED, 3, "ONE file two", "oops\n")
    assert not done.succeeded


@needs_isolation
def test_input_of_many_megabytes_arrives_whole() -> None:
    text = os.urandom(1 << 20).hex() * 4
    program = "import hashlib, sys; print(hashlib.md5(sys.stdin.buffer.read()).hexdigest())"
    done = run_program(program, text, kind=KIND)
    assert done.stdout.strip() == hashlib.md5(text.encode()).hexdigest()


@needs_isolation
def test_output_is_cut_at_the_limit() -> None:
    done = run_program("print('x' * 5000)", limits=Limits(output_kb=2), kind=KIND)
    assert (done.status, done.stdout) == (Status.OUTPUT, "x" * 2048)
    done = run_program("print('x' * 2047)", limits=Limits(output_kb=2), kind=KIND)
    assert (done.status, len(done.stdout)) == (Status.FINISHED, 2048)


@needs_isolation
def test_bytes_that_are_no_text_do_no_harm() -> None:
    done = run_program(r"import os; os.write(1, b'\xff\xfeok')", kind=KIND)
    assert done.stdout.endswith("ok")


@needs_isolation
def test_sets_have_the_same_order_in_every_run() -> None:
    program = "print({str(n) for n in range(50)})"
    assert len({run_program(program, kind=KIND).stdout for _ in range(3)}) == 1


@needs_isolation
def test_sandboxes_side_by_side_do_not_share_their_limits() -> None:
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
time.sleep(0.5)
print(len([name for name in os.listdir("/tmp")]))"""
    limits = Limits(processes=7)
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: run_program(program, limits=limits, kind=KIND), range(6)))
    assert [(one.status, one.stdout) for one in done] == [(Status.FINISHED, "1\n")] * 6


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "main.py", "..", ""])
def test_files_have_plain_names(name: str) -> None:
    with pytest.raises(ValueError, match="no name for a file"):
        run_program("", files={name: b""}, kind=KIND)


@needs_isolation
def test_a_sandbox_does_not_outlive_its_caller() -> None:
    nonce = f"nonce{secrets.token_hex(8)}"
    program = f"""
import os, sys
os.execv(sys.executable, ["python", "-S", "-c", "import time; time.sleep(600)", "{nonce}"])"""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, program, KIND],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    try:
        # The caller's own arguments have it too.
        until(lambda: len(survivors(nonce)) == 2, "the program runs", at_work=caller)
    finally:
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait()
    until(lambda: not survivors(nonce), "the program is gone")


CALLER = """
import sys
from stages.rewards.sandbox.run import run_program
from stages.rewards.sandbox.values import IsolationKind
run_program(sys.argv[1], kind=IsolationKind(sys.argv[2]))
"""


@needs_isolation
def test_a_sandbox_that_is_killed_is_an_error_and_no_outcome() -> None:
    before = set(below(os.getpid()))

    def of_the_sandbox() -> set[int]:
        return set(below(os.getpid())) - before

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_program, "import time; time.sleep(600)", kind=KIND)
        until(
            lambda: len(of_the_sandbox()) >= 3,
            "launcher, supervisor and program are there",
            at_work=lambda: not running.done(),
        )
        # As the kernel does when memory is short.
        for pid in sorted(of_the_sandbox()):
            # The launcher may have taken the others with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxBroken, match="without reporting a result"):
            running.result(timeout=TIMEOUT_S)


# Refuses this process, and all it starts, what sandboxes are made of: unshare, and clone with
# namespaces.
NO_ISOLATION = """
import errno, os, struct
from stages.rewards.sandbox import linux
unshare, clone = {"x86_64": (272, 56), "aarch64": (97, 220)}[os.uname().machine]
refuse = 0x50000 | errno.EPERM
steps = [
    (0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, refuse), (0x15, 0, 3, clone),
    (0x20, 0, 0, 16), (0x45, 0, 1, 0x7E020000), (0x06, 0, 0, refuse), (0x06, 0, 0, 0x7FFF0000),
]
linux.no_new_privileges()
linux.filter_system_calls(b"".join(struct.pack("=HBBI", *step) for step in steps))
"""

SCORE = """
import json, sys
from pathlib import Path
from stages.context import Context, StageError
from stages.contracts.rewards import Code
from stages.rewards.code import CodeScorer
words = json.loads(sys.argv[1])
ctx = Context(stage="score@iter_001", key="iter_001", seed=1, folder=Path(sys.argv[2]))
row = {"prompt": "p", "response": "print(4)", "finish_reason": "stop",
       "extra": {"tests": [{"input": "", "output": "4"}]}}
try:
    scorer = CodeScorer(ctx, "mine", Code(kind="code", allow_unisolated=words))
    print("rewards", scorer.score([row]))
except StageError as error:
    print("refused:", error)
"""


def _score_without_isolation(words: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_ISOLATION + SCORE, words, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_isolation_code_rewards_refuse_and_say_what_to_do(tmp_path: Path) -> None:
    done = _score_without_isolation("null", tmp_path)
    assert done.stdout.startswith("refused: rewards.mine (code): untrusted code needs isolation")
    for part in (
        "unshare: Operation not permitted",
        "install bubblewrap",
        'rewards.mine.allow_unisolated: "run hostile code on this machine without isolation"',
    ):
        assert part in done.stdout


def test_without_isolation_code_runs_if_the_user_says_so_in_so_many_words(tmp_path: Path) -> None:
    words = '"run hostile code on this machine without isolation"'
    done = _score_without_isolation(words, tmp_path)
    assert done.stdout == "rewards [1.0]\n"
    assert "WITHOUT ISOLATION" in done.stderr


def test_without_isolation_limits_still_hold() -> None:
    limits = Limits(cpu_s=5, wall_s=TIMEOUT_S, memory_mb=128, output_kb=16)
    ends = [
        run_program(program, limits=limits, kind=IsolationKind.NONE).status
        for program in ("while True: pass", "while True: print('x' * 999)", "print(1)")
    ]
    assert ends == [Status.CPU, Status.OUTPUT, Status.FINISHED]
    hungry = run_program("x = bytearray(1 << 30)", limits=limits, kind=IsolationKind.NONE)
    assert "MemoryError" in hungry.stderr


def test_without_isolation_nothing_stays_of_a_folder_that_is_hard_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deeper than Python's stack and than a path is long, with folders closed to their owner."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("stages.rewards.sandbox.run.GRACE_S", TIMEOUT_S)
    program = """
import os
os.mkdir("closed"); os.mkdir("closed/within"); open("closed/within/file", "w").close()
os.symlink("/", "everything"); os.mkfifo("a\\nb")
os.chmod("closed/within", 0); os.chmod("closed", 0)
for _ in range(3000): os.mkdir("dd"); os.chdir("dd")
"""
    limits = Limits(cpu_s=5, wall_s=TIMEOUT_S)
    done = run_program(program, limits=limits, kind=IsolationKind.NONE)
    assert done.succeeded, done.stderr
    assert list(tmp_path.iterdir()) == []


ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def verdict(bpf: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would do, step by step."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch, 0, *given)
    steps = list(struct.iter_unpack("=HBBI", bpf))
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            loaded &= operand
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: loaded & operand}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "arch", "number", "argument", "expected"),
    [
        ("x86_64", X86, 0, 0, ALLOW),  # read
        ("x86_64", X86, 59, 0, ALLOW),  # execve
        ("x86_64", X86, 101, 0, REFUSE),  # ptrace
        ("x86_64", X86, 165, 0, REFUSE),  # mount
        ("x86_64", X86, 272, 0, REFUSE),  # unshare
        ("x86_64", X86, 435, 0, UNKNOWN),  # clone3
        ("x86_64", X86, 56, 0x01200011, ALLOW),  # clone, as fork does it
        ("x86_64", X86, 56, 0x003D0F00, ALLOW),  # clone, as threads do it
        ("x86_64", X86, 56, 0x10000011, REFUSE),  # clone with a user namespace
        ("x86_64", X86, 41, 1, ALLOW),  # socket AF_UNIX
        ("x86_64", X86, 41, 2, REFUSE),  # socket AF_INET
        ("x86_64", X86, 53, 2, REFUSE),  # socketpair AF_INET
        ("x86_64", X86, 302, 0, ALLOW),  # prlimit of itself
        ("x86_64", X86, 302, 1, REFUSE),  # prlimit of the supervisor
        ("x86_64", X86, 0x40000000 + 101, 0, KILL),  # the x32 ABI
        ("x86_64", I386, 11, 0, KILL),  # 32 bits
        ("aarch64", ARM, 63, 0, ALLOW),  # read
        ("aarch64", ARM, 117, 0, REFUSE),  # ptrace
        ("aarch64", ARM, 220, 0x01200011, ALLOW),  # clone
        ("aarch64", ARM, 220, 0x20000011, REFUSE),  # clone with a PID namespace
        ("aarch64", ARM, 198, 10, REFUSE),  # socket AF_INET6
        ("aarch64", X86, 63, 0, KILL),
    ],
)
def test_the_filter_decides_as_meant(
    machine: str, arch: int, number: int, argument: int, expected: int
) -> None:
    assert verdict(filter_for(machine), arch, number, argument) == expected


@pytest.mark.parametrize(
    ("machine", "arch", "numbers"),
    [("x86_64", X86, (9, 54, 13, 302, 160)), ("aarch64", ARM, (222, 208, 134, 261, 164))],
)
def test_the_filter_looks_at_more_than_the_first_argument(
    machine: str, arch: int, numbers: tuple[int, ...]
) -> None:
    mmap, setsockopt, sigaction, prlimit, setrlimit = numbers

    def asked(number: int, *arguments: int) -> int:
        return verdict(filter_for(machine), arch, number, *arguments)

    somewhere, high_up = 0x1000, 0x7F00_0000_0000
    assert asked(mmap, 0, 4096, 3, 0x22) == ALLOW  # private and anonymous
    assert asked(mmap, 0, 4096, 3, 0x01) == ALLOW  # a file, shared
    assert asked(mmap, 0, 4096, 3, 0x21) == REFUSE
    assert asked(mmap, 0, 4096, 3, 0x40023) == REFUSE  # validated, huge pages
    assert asked(setsockopt, 3, 1, 2) == ALLOW  # SO_REUSEADDR
    assert asked(setsockopt, 3, 6, 7) == ALLOW  # of another level
    assert asked(setsockopt, 3, 1, 7) == REFUSE
    assert asked(sigaction, 15, somewhere) == ALLOW  # SIGTERM
    assert asked(sigaction, 17, 0, somewhere) == ALLOW  # SIGCHLD is asked for
    assert asked(sigaction, 17, somewhere) == REFUSE
    assert asked(sigaction, 17, high_up) == REFUSE
    assert asked(prlimit, 0, 7, somewhere) == ALLOW  # of open files
    assert asked(prlimit, 1, 7, 0, somewhere) == REFUSE  # of another process
    assert asked(prlimit, 0, 4, 0, somewhere) == ALLOW  # of core files, asked for
    assert asked(prlimit, 0, 4, somewhere) == REFUSE
    assert asked(prlimit, 0, 4, high_up) == REFUSE
    assert asked(setrlimit, 7, somewhere) == ALLOW
    assert asked(setrlimit, 4, somewhere) == REFUSE


@needs_isolation
def test_a_crash_is_for_nobody_outside_and_the_program_cannot_change_that() -> None:
    """A limit of 1 is the kernel's word for it: 0 stops files, and no program that takes cores."""
    program = """
import resource
print(resource.getrlimit(resource.RLIMIT_CORE))
try: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (OSError, ValueError): print("refused")
resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
"""
    done = run_program(program, kind=KIND)
    assert done.succeeded, done.stderr
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = 0 if hard == 0 else 1
    assert done.stdout.splitlines() == [str((most, most)), "refused"]


def test_what_lies_in_swap_counts_as_memory(tmp_path: Path) -> None:
    """With made-up files: what a machine swaps, and whether, is not for a test to say."""
    stat = "7 (a (na)me) S " + " ".join(["1"] * 19) + " 0 {pages} " + "0 " * 20
    for pid, pages, swapped in (("7", 3, "VmSwap:\t     512 kB\n"), ("8", 2, "")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(stat.format(pages=pages))
        (tmp_path / pid / "status").write_text(f"Name:\tx\nVmRSS:\t 12 kB\n{swapped}Threads:\t1\n")
    (tmp_path / "9").mkdir()  # it has just ended
    proc = os.open(tmp_path, os.O_RDONLY)
    try:
        used = _usage(proc, None)
    finally:
        os.close(proc)
    assert used.memory == 5 * os.sysconf("SC_PAGE_SIZE") + 512 * 1024


def test_a_machine_without_a_filter_has_no_isolation() -> None:
    with pytest.raises(OSError, match="riscv64"):
        filter_for("riscv64")


@pytest.fixture
def python_elsewhere() -> Iterator[Path]:
    """This Python under /tmp, in a folder whose name has letters of other languages and a space."""
    left_out = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "config-*")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pyth\u00f6n \u3000") as folder:
        home = Path(folder).resolve()
        library = Path(sysconfig.get_path("stdlib"))
        shutil.copytree(library, home / "lib" / library.name, ignore=left_out)
        for shared in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3*.so*"):
            shutil.copy(shared, home / "lib")
        (home / "bin").mkdir()
        yield Path(shutil.copy(interpreter(), home / "bin"))


@needs_isolation
def test_a_python_under_tmp_or_with_other_letters_in_its_path_runs_programs(
    python_elsewhere: Path,
) -> None:
    program = """
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.run import run_program
done = run_program("import os; open('x', 'w'); print(os.getcwd())", kind=isolation().kind)
print(isolation().kind, done.succeeded, done.stdout.strip(), done.stderr)"""
    library = {"LD_LIBRARY_PATH": str(python_elsewhere.parent.parent / "lib")}
    done = subprocess.run(
        [python_elsewhere, "-S", "-s", "-c", program],
        env={**library, "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(KIND), "True", "/var/tmp"], done.stdout + done.stderr
