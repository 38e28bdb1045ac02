"""Sessions that attack one another, and what came of it.

python neighbours.py KIND NAME... prints a JSON object: for each attack what leaked. One session
leaves something behind, and lives on; a second one looks for it; the first one ends, and a third
one looks. It needs the standard library only, so that it can run as another user.
"""

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from stages.rewards.sandbox.session import Session  # noqa: E402
from stages.rewards.sandbox.values import IsolationKind, Limits  # noqa: E402
from tests.sandbox.attack import below, survivors  # noqa: E402

LIMITS = Limits(cpu_s=5, wall_s=60, processes=8)
HEADER = """
import _posixshmem, builtins, ctypes, gc, json, os, random, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what): print("ESCAPED", *what, flush=True)
def attempt(what, action):
    try:
        if action() is not False: escaped(what)
    except (OSError, ImportError, ValueError, AttributeError): pass
def tried(action):
    try: return action()
    except OSError: return None
"""

ATTACKS = {
    "files": (
        """
os.umask(0)
folders = [".", "/tmp", "/var/tmp", "/dev/shm"]
if ISOLATED: folders += ["/", os.path.dirname(os.__file__)]
for folder in folders: tried(lambda: open(os.path.join(folder, NAME), "w").write(SECRET))
print(os.path.exists(NAME))""",
        """
for folder in [".", "/", "/tmp", "/var/tmp", "/dev/shm", os.path.dirname(os.__file__)]:
    attempt(folder, lambda: print(open(os.path.join(folder, NAME)).read()))
for pid in PIDS:
    attempt("cwd", lambda: print(open(f"/proc/{pid}/cwd/{NAME}").read()))
    attempt("root", lambda: os.listdir(f"/proc/{pid}/root/tmp") and True)""",
        "for folder in folders: tried(lambda: os.unlink(os.path.join(folder, NAME)))",
    ),
    "variables": (
        """
for place in (builtins, sys, json, os, random, gc): place.left_here = SECRET
os.environ["LEFT_HERE"] = SECRET
os.putenv("LEFT_HERE", SECRET)
random.seed(SECRET)
random.random = json.dumps = builtins.len = lambda *_: SECRET
sys.modules["left_here"] = json
left_here = SECRET
print(len([]) == SECRET)""",
        """
for place in (builtins, sys, json, os, random, gc):
    attempt(place.__name__, lambda: print(place.left_here))
if "left_here" in globals() or "left_here" in sys.modules or "LEFT_HERE" in os.environ:
    escaped("a name")
if len([]) != 0 or json.dumps([]) != "[]" or libc.getenv(b"LEFT_HERE"): escaped("a patch")
for held in gc.get_objects():
    if type(held) is dict and held is not globals() and NAME + "-secret" in held.values():
        escaped("an object")""",
        "",
    ),
    "memory": (
        """
hoard = [(NAME + "-left-behind").encode() * 10000 for _ in range(100)]
print(len(hoard))""",
        """
libc.malloc.restype = ctypes.c_void_p
for _ in range(20):
    start = libc.malloc(ctypes.c_size_t(1 << 22))
    if ctypes.string_at(start, 1 << 22).find((NAME + "-left").encode()) >= 0: escaped("memory")
buffer = ctypes.create_string_buffer(64)
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
mine = Part(ctypes.addressof(buffer), 64)
for pid in PIDS:
    for number in (310, 270)[os.uname().machine != "x86_64":][:1]:
        if libc.syscall(number, pid, ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0) >= 0:
            escaped("read")
    attempt("mem", lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY) and True)
    attempt("maps", lambda: open(f"/proc/{pid}/maps").read() and True)""",
        "",
    ),
    "processes": (
        """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", NAME])
print(child.poll() is None)""",
        """
visible = set(tried(lambda: os.listdir("/proc")) or []) - {str(os.getpid())}
for pid in [*PIDS, *filter(str.isdigit, visible)]:
    attempt("cmdline", lambda: NAME in open(f"/proc/{pid}/cmdline").read())
    attempt("environ", lambda: open(f"/proc/{pid}/environ").read() and True)
    for end in range(8): attempt("fd", lambda: os.stat(f"/proc/{pid}/fd/{end}") and True)""",
        """
if child.poll() is not None: escaped("the child is gone")
child.kill()""",
    ),
    "a daemon": (
        """
begun, kept = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, ["python", "-S", "-c", "import time; time.sleep(600)", NAME])
    os._exit(0)
os.close(kept)
os.read(begun, 1)  # until it is another program, which closes its end
print("left")""",
        "pass",
        "",
    ),
    "signals": (
        """
got = []
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(number))
print(got)""",
        """
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
    for pid in PIDS: attempt("kill", lambda: os.kill(pid, number) or True)
    if ISOLATED:
        for pid in PIDS: attempt("group", lambda: os.killpg(pid, signal.SIGKILL) or True)
        signal.signal(number, signal.SIG_IGN)
        tried(lambda: os.kill(-1, number))""",
        "if got: escaped(got)",
    ),
    "sockets": (
        """
import threading
servers = []
for address in ("\\0" + NAME, "/tmp/" + NAME):
    server = socket.socket(socket.AF_UNIX)
    tried(lambda: server.bind(address)); server.listen()
    servers.append(server)
print(len(servers))""",
        """
for address in ("\\0" + NAME, "/tmp/" + NAME):
    attempt(address, lambda: socket.socket(socket.AF_UNIX).connect(address) or True)""",
        """
import select
if select.select(servers, [], [], 0)[0]: escaped("a visitor")
tried(lambda: os.unlink("/tmp/" + NAME))""",
    ),
    "shared memory": (
        """
import errno
tried(lambda: os.write(_posixshmem.shm_open("/" + NAME, os.O_CREAT | os.O_RDWR, 0o666), b"x"))
page = libc.shmget(4711, 4096, 0o1666)
print(page)""",
        """
attempt("posix", lambda: _posixshmem.shm_open("/" + NAME, os.O_RDWR, 0) and True)
if libc.shmget(4711, 4096, 0) >= 0: escaped("System V")
attempt("queue", lambda: libc.mq_open(("/" + NAME).encode(), 0) >= 0)""",
        'tried(lambda: _posixshmem.shm_unlink("/" + NAME))',
    ),
    "limits": (
        """
children = []
for _ in range(6):
    child = os.fork()
    if child == 0: time.sleep(600)
    children.append(child)
try:
    with open("big", "wb") as file:
        while True: file.write(b"x" * (1 << 20))
except OSError: pass
print(len(children))""",
        """
children = []
for _ in range(5):
    child = os.fork()
    if child == 0: time.sleep(600)
    children.append(child)
open("small", "wb").write(b"x" * (1 << 20))
for child in children: os.kill(child, 9); os.waitpid(child, 0)""",
        "",
    ),
    "descriptors": (
        """
print(sum(bool(tried(lambda: os.fstat(end))) for end in range(4096)) > 3)""",
        """
for end in range(3, 4096):
    if tried(lambda: os.fstat(end)):
        tried(lambda: os.set_blocking(end, False))
        told = tried(lambda: os.read(end, 4096))
        if told: escaped(told)
for end in range(3, 4096):
    tried(lambda: os.write(end, b"d" * 100))""",
        "print('still answers')",
    ),
}
# Without isolation these must be seen. The others are refused by the filter or the limits, which
# hold there, too; or would hit more than a neighbour.
HARMLESS = ("files", "processes", "a daemon", "signals", "sockets", "shared memory")


def attack(name: str, kind: IsolationKind) -> list[str]:
    """What leaked from one session to another."""
    leaves, looks, cleans = ATTACKS[name]
    own_name = f"name{secrets.token_hex(8)}"
    told = f"NAME = {own_name!r}\nISOLATED = {kind is not IsolationKind.NONE}\n"
    secret = f"{own_name}-secret"
    before = set(below(os.getpid()))
    first = Session(0, LIMITS, kind)
    leaks = []
    try:
        left = first.execute(HEADER + told + f"SECRET = {secret!r}\n" + leaves)
        if left.ended is not None or "Error" in left.text:
            return [f"it left nothing: {left}"]
        pids = sorted(set(below(os.getpid())) - before)
        if kind is IsolationKind.NONE:
            # Its supervisor would be hit, too.
            pids = [int(first.execute("os.getpid()").text)]
        second = Session(0, LIMITS, kind)
        leaks += _looked(second, f"{told}PIDS = {pids!r}\n{looks}", secret)
        second.close()
        after = first.execute(cleans or "pass")
        leaks += [line for line in after.text.splitlines() if "ESCAPED" in line]
        if after.ended is not None or "Error" in after.text:
            leaks.append(f"it was harmed: {after}")
    finally:
        first.close()
    third = Session(0, LIMITS, kind)
    leaks += _looked(third, f"{told}PIDS = []\n{looks}", secret)
    third.close()
    time.sleep(0.1)
    for pid in survivors(own_name):
        leaks.append("a process lives on")
        os.kill(pid, signal.SIGKILL)
    return leaks


def _looked(session: Session, looks: str, secret: str) -> list[str]:
    done = session.execute(HEADER + looks)
    leaks = [line for line in done.text.splitlines() if "ESCAPED" in line]
    if secret in done.text:
        leaks.append("the secret is in its output")
    if done.ended is not None or "Error" in done.text:
        leaks.append(f"it could not look: {done}")
    return leaks


if __name__ == "__main__":
    kind, *names = sys.argv[1:]
    print(json.dumps({name: attack(name, IsolationKind(kind)) for name in names}))
