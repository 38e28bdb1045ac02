"""Programs that try to get out of the sandbox, or to wear it down.

Each reads its targets (paths, ports, pids of the world outside) from standard input, and prints
ESCAPED if it thinks it got somewhere. What happened is also looked at from outside.
"""

HEADER = """
import ctypes, errno, json, mmap, os, resource, signal, socket, stat, subprocess, sys, time
import threading
T = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def escaped(what): print("ESCAPED", what, flush=True)
def attempt(what, action):
    try:
        if action() is not False: escaped(what)
    except (OSError, ImportError, ValueError, AttributeError): pass
def call(what, x86, arm, *arguments):
    number = x86 if X86 else arm
    if libc.syscall(ctypes.c_long(number), *arguments) >= 0: escaped(what)
    elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): escaped(what + " was not refused")
def show(path): print(open(path, "rb").read(100000)); return True
"""

FILES = {
    "reads a file of the caller": 'attempt("read", lambda: show(T["secret"]))',
    "reads it by way of ..": 'attempt("read", lambda: show("../" * 30 + T["secret"]))',
    "reads it through a symlink": """
os.symlink(T["secret"], "link"); attempt("read", lambda: show("link"))
os.symlink("/", "all"); attempt("read", lambda: show("all" + T["secret"]))""",
    "links its way out": 'attempt("link", lambda: os.link(T["secret"], "here") or True)',
    "reads it through /proc": """
for pid in ("self", "1", str(os.getppid()), str(T["pid"])):
    attempt("root", lambda: show(f"/proc/{pid}/root{T['secret']}"))
    attempt("cwd", lambda: show(f"/proc/{pid}/cwd/../../../../../..{T['secret']}"))""",
    "reads passwords and keys": """
keys = os.path.join(T["home"], ".ssh/id_rsa")
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/hosts", keys):
    attempt(path, lambda: show(path))""",
    "lists the caller's folders": """
for path in (T["project"], os.path.dirname(T["secret"]), "/home", "/var", "/run", "/etc/ssl"):
    attempt(path, lambda: os.listdir(path) and True)""",
    "reads the caller's environment": """
for pid in ("self", "1", str(os.getppid()), str(T["pid"])):
    if pid != "self": attempt("environ", lambda: show(f"/proc/{pid}/environ"))
print(dict(os.environ))
if set(os.environ) - {"PATH", "HOME", "LANG", "LC_CTYPE", "PYTHONHASHSEED", "LD_LIBRARY_PATH"}:
    escaped("environment")""",
    "uses descriptors left open": """
for end in range(3, 4096):
    attempt(f"descriptor {end}", lambda: os.fstat(end) and True)""",
    "writes into a file of the caller": """
attempt("write", lambda: open(T["secret"], "a").write("x"))
attempt("remove", lambda: os.unlink(T["secret"]) or True)""",
    "writes outside its folder": """
for folder in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/proc", os.path.dirname(sys.executable),
               os.path.dirname(os.__file__), T["folder"], "/var/tmp", "/dev/shm", "/run", "/sys"):
    attempt(folder, lambda: open(os.path.join(folder, T["nonce"]), "w").write("x"))""",
    "changes the interpreter": """
for path in (sys.executable, os.__file__, json.__file__):
    attempt("write " + path, lambda: open(path, "r+b").write(b""))
    attempt("append " + path, lambda: open(path, "ab").write(b""))
    attempt("chmod " + path, lambda: os.chmod(path, 0o777) or True)
    attempt("rename " + path, lambda: os.rename(path, path + ".old") or True)
    attempt("utime " + path, lambda: os.utime(path) or True)""",
    "breaks out of a chroot": """
def out():
    os.mkdir("jail"); os.chroot("jail")
    for _ in range(30): os.chdir("..")
    os.chroot("."); return show(T["secret"])
attempt("chroot", out)""",
    "mounts file systems": """
os.mkdir("m")
for source, kind in (("proc", "proc"), ("tmpfs", "tmpfs"), ("sysfs", "sysfs")):
    if libc.mount(source.encode(), b"m", kind.encode(), 0, None) == 0: escaped(kind)
if libc.mount(b"/", b"m", None, 4096, None) == 0: escaped("bind")
if libc.umount2(b"/tmp", 2) == 0: escaped("umount")
call("open_tree", 428, 428, -100, b"/", 0)
call("fsopen", 430, 430, b"tmpfs", 0)
call("move_mount", 429, 429, -1, b"", -1, b"", 0)""",
    "makes a writable library folder": """
if libc.mount(None, b"/usr/lib", None, 32 | 4096, None) == 0: escaped("remount")
if libc.mount(None, b"/", None, 32, None) == 0: escaped("remount")""",
    "makes device nodes": """
for kind, number in ((stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFBLK, os.makedev(8, 0)),
                     (stat.S_IFCHR, os.makedev(1, 1))):
    attempt("mknod", lambda: os.mknod("node", kind | 0o666, number) or True)""",
    "opens devices": """
for name in ("mem", "kmem", "kmsg", "port", "vda", "sda", "nvme0n1", "tty", "ptmx", "fuse", "kvm",
             "nvidia0", "net/tun", "console", "loop-control"):
    attempt(name, lambda: os.open("/dev/" + name, os.O_RDWR) and True)""",
    "changes settings of the kernel": """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
             "/sys/kernel/uevent_helper", "/sys/fs/cgroup/release_agent"):
    attempt(path, lambda: open(path, "w").write("x"))""",
    "opens files by handle": """
class Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 8)]
handle = Handle(8, 1, (ctypes.c_ubyte * 8)(2))
root = os.open("/", os.O_RDONLY)
call("open_by_handle_at", 304, 265, root, ctypes.byref(handle), os.O_RDONLY)""",
    "imports the project": """
import glob
sys.path += [T["project"], *T["packages"]]
sys.path += glob.glob(sys.prefix + "/lib/python*/site-packages")
sys.path += ["/usr/lib/python3/dist-packages"]
for name in ("pipelines", "stages.rewards.verifier", "stages.score", "pydantic", "yaml"):
    attempt(name, lambda: __import__(name) and True)""",
}

RIGHTS = {
    "becomes root": """
for action in (os.setuid, os.setgid, os.seteuid, os.setegid):
    attempt(action.__name__, lambda: action(0) or True)
attempt("setresuid", lambda: os.setresuid(0, 0, 0) or True)
attempt("setgroups", lambda: os.setgroups([0]) or True)
if 0 in (os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()): escaped("root")""",
    "runs a set-uid program": """
import shutil
shutil.copy(sys.executable, "python"); os.chmod("python", 0o6755)
command = ["./python", "-S", "-c", "import os; print(os.geteuid())"]
done = subprocess.run(command, capture_output=True)
if done.stdout.strip() == b"0": escaped("root")
for path in ("/usr/bin/su", "/usr/bin/sudo", "/usr/bin/newuidmap", "/usr/bin/mount"):
    if os.path.exists(path): escaped(path)""",
    "finds capabilities": """
for capability in range(64):
    if libc.prctl(23, capability, 0, 0, 0) == 1 and libc.prctl(24, capability, 0, 0, 0) == 0:
        escaped("may drop, so has, a capability")
class Header(ctypes.Structure): _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
sets = (ctypes.c_uint32 * 6)()
libc.capget(ctypes.byref(Header(0x20080522, 0)), ctypes.byref(sets))
if any(sets): escaped("capabilities")
if libc.prctl(39, 0, 0, 0, 0) != 1: escaped("could gain privileges")""",
    "makes namespaces": """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
    if libc.unshare(flag) == 0: escaped(hex(flag))
    call("clone", 56, 220, flag | signal.SIGCHLD, 0, 0, 0, 0)
call("clone3", 435, 435, 0, 0)
call("setns", 308, 268, 0, 0)""",
    "calls risky parts of the kernel": """
page = ctypes.create_string_buffer(4096)
call("bpf", 321, 280, 0, page, 64)
call("perf_event_open", 298, 241, page, 0, -1, -1, 0)
call("userfaultfd", 323, 282, 0)
call("io_uring_setup", 425, 425, 1, page)
call("kexec_load", 246, 104, 0, 0, 0, 0)
call("init_module", 175, 105, page, 1, b"")
call("personality", 135, 92, 0x0040000)
call("fanotify_init", 300, 262, 0, 0)
call("syslog", 103, 116, 3, page, 4096)
call("reboot", 169, 142, 0, 0, 0, 0)
call("settimeofday", 164, 170, page, 0)
call("sethostname", 170, 161, b"mine", 4)""",
    "reaches for the keyrings": """
call("add_key", 248, 217, b"user", b"mine", b"x", 1, -3)
call("keyctl", 250, 219, 0, -3, 0)
call("request_key", 249, 218, b"user", b"mine", 0, 0)""",
    "learns the name of the machine": """
if os.uname().nodename == T["host"]: escaped("host name")""",
}

NETWORK = {
    "connects to a server": """
for host in ("127.0.0.1", "localhost", T["address"]):
    attempt("tcp", lambda: socket.create_connection((host, T["port"]), timeout=2))""",
    "sends a datagram": """
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(
    b"x", ("127.0.0.1", T["udp"])))""",
    "uses IPv6": 'attempt("v6", lambda: socket.socket(socket.AF_INET6) and True)',
    "opens raw and odd sockets": """
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and True)
for family in (2, 10, 16, 17, 29, 31, 38, 40, 44):
    attempt(f"family {family}", lambda: socket.socket(family, socket.SOCK_DGRAM) and True)
    attempt(f"family {family}", lambda: socket.socket(family, socket.SOCK_RAW) and True)""",
    "meets another sandbox in a socket without a file": """
server = socket.socket(socket.AF_UNIX); server.bind("\\0" + "meeting"); server.listen()
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) and True)
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM) and True)""",
    "asks for a name": 'attempt("dns", lambda: socket.getaddrinfo("example.org", 80) and True)',
    "connects to a socket in the file system": """
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(T["unix"]) or True)
attempt("slurm", lambda: socket.socket(socket.AF_UNIX).connect("/run/munge/munge.socket.2") or True)
attempt("docker", lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock") or True)""",
    "connects to an abstract socket": """
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + T["nonce"]) or True)""",
}

PROCESSES = {
    "sends signals to the caller": """
attempt("signal", lambda: os.kill(T["pid"], signal.SIGUSR1) or True)""",
    "kills whatever it can": """
if os.fork() == 0:
    attempt("all", lambda: os.kill(-1, signal.SIGKILL) or False)
    os._exit(0)
time.sleep(0.2)
os.kill(0, signal.SIGKILL)""",
    "kills the supervisor": """
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP,
               signal.SIGUSR1, signal.SIGABRT, signal.SIGSEGV, signal.SIGALRM, signal.SIGCHLD):
    for _ in range(5):
        try: os.kill(1, number)
        except PermissionError: pass
time.sleep(0.3)
print("still here")""",
    "starves the supervisor": """
for what in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
    attempt("prlimit", lambda: resource.prlimit(1, what, (0, 0)) and True)
attempt("affinity", lambda: os.sched_setaffinity(1, {0}) or True)
attempt("scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)) or True)
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19) or True)
attempt("all of the user", lambda: os.setpriority(os.PRIO_USER, 0, 19) or True)
print("still here")""",
    "traces other processes": """
for pid in (1, os.getppid(), T["pid"]):
    call("ptrace attach", 101, 117, 16, pid, 0, 0)
    call("ptrace seize", 101, 117, 0x4206, pid, 0, 0)
call("kcmp", 312, 272, 1, os.getpid(), 0, 0, 0)""",
    "reads the memory of other processes": """
buffer = ctypes.create_string_buffer(64)
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
mine = Part(ctypes.addressof(buffer), 64)
for pid in (1, os.getppid(), T["pid"]):
    call("readv", 310, 270, pid, ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0)
    call("writev", 311, 271, pid, ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0)
    attempt("mem", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR) and True)
    attempt("maps", lambda: show(f"/proc/{pid}/maps"))""",
    "takes descriptors of other processes": """
for pid in (1, T["pid"]):
    try: other = os.pidfd_open(pid)
    except OSError: continue
    for end in range(20): call("pidfd_getfd", 438, 438, other, end, 0)
for end in range(20):
    for mode in ("r", "w"): attempt("fd", lambda: open(f"/proc/1/fd/{end}", mode) and True)""",
    "says that it is done in the supervisor's name": """
for end in range(3, 64):
    try: os.write(end, b"finished 0\\n")
    except OSError: pass
sys.exit(7)""",
    "names itself like a line of the supervisor's": """
libc.prctl(15, b"x) R 1\\n1 (S 0", 0, 0, 0)
if os.fork() == 0: time.sleep(0.2); os._exit(0)
os.wait(); print("still here")""",
    "runs a program that is in no folder": """
import shutil
call("memfd_create", 319, 279, b"mine", 0)
shutil.copy(sys.executable, "mine")
program = os.open("mine", os.O_RDONLY); os.unlink("mine")
code = "import socket, sys, os; print(os.getuid()); socket.socket(socket.AF_INET)"
child = os.fork()
if child == 0: os.close(2); os.execve(program, ["python", "-S", "-c", code], os.environ)
if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0: escaped("network")""",
    "leaves a daemon behind": """
begun, kept = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for end in range(3): os.close(end)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, 1)
        os.execv(sys.executable, ["python", "-S", "-c", "import time; time.sleep(600)", T["nonce"]])
    os._exit(0)
os.close(kept)
os.read(begun, 1)  # until it is another program, which closes its end""",
    "leaves a daemon that holds on to its output": """
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, ["python", "-S", "-c", "import time; time.sleep(600)", T["nonce"]])
print("bye", flush=True)""",
    "forks without end": """
while True:
    try: os.fork()
    except OSError: pass""",
    "forks without end, each in a session of its own": """
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: time.sleep(0.001)""",
    "forks and leaves, so that nobody sees its parent": """
while True:
    try:
        if os.fork(): os._exit(0)
        os.fork()
    except OSError: pass""",
    "starts threads without end": """
while True:
    try: threading.Thread(target=time.sleep, args=(600,)).start()
    except Exception: pass""",
}

RESOURCES = {
    "takes all memory": """
hoard = []
while True:
    try: hoard.append(b"x" * (1 << 22))
    except MemoryError: pass""",
    "takes all memory in many processes": """
for _ in range(6):
    if os.fork() == 0: break
hoard = []
while True:
    try: hoard.append(bytearray(b"x") * (1 << 20)); time.sleep(0.001)
    except MemoryError: time.sleep(1)""",
    "takes memory that belongs to nobody": """
call("memfd_create", 319, 279, b"mine", 0)
call("memfd_secret", 447, 447, 0)
call("shmget", 29, 194, 0, 1 << 30, 0o1600)
call("msgget", 68, 186, 0, 0o1600)
call("semget", 64, 190, 0, 100, 0o1600)
attributes = (ctypes.c_long * 8)(0, 8, 65536)
call("mq_open", 240, 180, b"mine", 0o102, 0o600, attributes)""",
    "hides shared memory from every page table": """
for _ in range(4):
    if os.fork() == 0: break
hidden = []
try:
    while True:
        hidden.append(mmap.mmap(-1, 1 << 24))
        for at in range(0, 1 << 24, 4096): hidden[-1][at] = 1
        hidden[-1].madvise(mmap.MADV_DONTNEED)
except (OSError, MemoryError): pass
if hidden: escaped("shared memory"); time.sleep(1)
attempt("zero", lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 24) and True)""",
    "leaves huge pages in pipes": """
HUGE = 1 << 21
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc.mmap.restype = ctypes.c_void_p
held = 0
try:
    while held < 512 << 20:
        read, write = os.pipe(); os.set_blocking(write, False)
        for _ in range(16):
            size = ctypes.c_size_t(2 * HUGE)
            base = libc.mmap(None, size, 3, 0x22, -1, ctypes.c_long(0))
            start = -(-base // HUGE) * HUGE
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(HUGE), 14)
            ctypes.memset(start, 1, HUGE)
            part = Part(start, 4096)
            call("vmsplice", 278, 75, write, ctypes.byref(part), 1, 0)
            libc.munmap(ctypes.c_void_p(base), size)
            held += HUGE
except OSError: pass""",
    "leaves memory in sockets": """
held, ends = 0, []
try:
    while True:
        ends += socket.socketpair()
        try: ends[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        except PermissionError: pass
        ends[-1].setblocking(False)
        try:
            while True: held += ends[-1].send(b"x" * 60000)
        except BlockingIOError: pass
except OSError: pass
if held > 32 << 20: escaped(held)""",
    "takes more of what is counted by user": """
instances = 0
while libc.inotify_init1(0) >= 0: instances += 1
if instances > 64: escaped("inotify")
timer = ctypes.c_void_p()
timers = 0
while timers < 10000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0: timers += 1
if timers >= 10000: escaped("timers")
for _ in range(100000):
    if libc.sigqueue(os.getpid(), 0, None): break
os.kill(os.getpid(), 0)""",
    "builds what is hard to remove": """
os.mkdir("locked"); open("locked/file", "w").close(); os.chmod("locked", 0)
for name in ("a\\nb", "\\x01", "\\udcff", " ", "-rf", "*", "x" * 255): open(name, "w").close()
depth = 0
try:
    while depth < 1000000: os.mkdir("d"); os.chdir("d"); depth += 1
    escaped("inodes")
except OSError: pass
os.chmod(".", 0)""",
    "fills the disk": """
total = 0
try:
    for number in range(100000):
        with open(f"/tmp/{number}", "wb") as file: total += file.write(b"x" * (1 << 20))
        if total > 64 << 20: escaped(total); break
except OSError: pass""",
    "makes one huge file": """
try:
    with open("big", "wb") as file:
        while file.write(b"x" * (1 << 20)):
            if file.tell() > 64 << 20: escaped("size"); break
except OSError: pass
attempt("sparse", lambda: os.truncate("big", 1 << 40) or True)""",
    "makes files without end": """
number = 0
try:
    while number <= 50000: open(f"/tmp/{number}", "w").close(); number += 1
    escaped(number)
except OSError: pass""",
    "opens descriptors without end": """
ends = []
try:
    while True: ends += os.pipe()
except OSError: pass
if len(ends) > 100: escaped(len(ends))""",
    "prints without end": 'while True: print("x" * 10000)',
    "prints errors without end": 'while True: print("x" * 10000, file=sys.stderr)',
    "prints in many processes": """
for _ in range(6):
    if os.fork() == 0: break
while True: os.write(1, b"x" * 65536)""",
    "computes without end": "while True: pass",
    "computes without end in many processes": """
for _ in range(6):
    if os.fork() == 0: break
while True: pass""",
    "computes on through the warning": """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
attempt("more", lambda: resource.setrlimit(resource.RLIMIT_CPU, (600, 600)) or True)
while True: pass""",
    "computes in children that nobody buries": """
try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except PermissionError: pass
try: libc.sigaction(signal.SIGCHLD, ctypes.create_string_buffer(b"\\1", 256), None)
except OSError: pass
for _ in range(40):
    if os.fork() == 0:
        begun = time.process_time()
        while time.process_time() - begun < 0.3: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
escaped("more CPU time than there is")""",
    "computes in children whose end is no signal": """
for _ in range(2000):
    child = libc.syscall(ctypes.c_long(56 if X86 else 220), 0, 0, 0, 0, 0)
    if child == 0:
        begun = time.process_time()
        while time.process_time() - begun < 0.3: pass
        os._exit(0)
    time.sleep(0.01)
escaped("more CPU time than there is")""",
    "computes in one long instruction": "10 ** (10 ** 9)",
    "sleeps for ever": "time.sleep(600)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "does not read its input": "os.close(0); time.sleep(0.2)",
    "recurses without end": """
sys.setrecursionlimit(10 ** 9)
def deeper(): deeper()
deeper()""",
    "crashes": "ctypes.string_at(0)",
    "raises its limits": """
for what in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE,
             resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_CORE):
    attempt("limit", lambda: resource.setrlimit(what, (resource.RLIM_INFINITY,) * 2) or True)""",
}

SLEEPERS = ("sleeps for ever", "stops itself")
BURNERS = (
    *(name for name in RESOURCES if name.startswith("computes ")),
    *(name for name in PROCESSES if name.startswith("forks ")),
    "starts threads without end",
)
"""Each takes all the time of a processor that it may have, and does nothing else."""
PROGRAMS = {**FILES, **RIGHTS, **NETWORK, **PROCESSES, **RESOURCES}

# What an escape looks like: these are harmless enough to be let out, and must then be noticed.
HARMLESS = (
    "reads a file of the caller",
    "reads it by way of ..",
    "reads it through a symlink",
    "lists the caller's folders",
    "writes into a file of the caller",
    "imports the project",
    "connects to a socket in the file system",
    "connects to an abstract socket",
    "sends signals to the caller",
    "leaves a daemon behind",
    "learns the name of the machine",
)
