"""The servers of throwaway clones, forked from one process that has imported the libraries.

A clone's first stage starts a server, which imports torch and transformers for seconds. A test
session has hundreds of clones. So the tests have one parent: for each clone it forks a process that
imports the clone's own code and then is that clone's server, the same as any other. Where a test
changes the code or the settings afterwards, the commands start a server of their own, as always.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

_LIBRARIES = (
    "torch",
    "torch.nn.attention.varlen",
    "torch.utils.checkpoint",
    "numpy",
    "pyarrow.parquet",
    "safetensors.torch",
    "tokenizers",
    "jinja2",
    "peft",
    "pydantic",
    "submitit",
    "psutil",
)
_parent: socket.socket | None = None


def fork_server(
    folder: Path, kind: str, code: Path, root: Path, environment: dict[str, str]
) -> None:
    """Have a server forked for the clone at `root`; it takes over `folder` within a second."""
    from pipelines.warm import wire

    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        message = {"folder": str(folder), "kind": kind, "code": str(code), "root": str(root)}
        connection = _reach()
        wire.send(connection, {**message, "environment": environment}, [log.fileno()])
        assert wire.receive(connection) is not None, "the parent of the servers is gone"


def _reach() -> socket.socket:
    """This process's parent of servers, started at the first need; it ends with this process."""
    global _parent
    if _parent is None:
        _parent, other = socket.socketpair()
        words = [sys.executable, "-m", "tests.forks", str(other.fileno()), "-" * 2000]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(words, env=environment, pass_fds=[other.fileno()])
        atexit.register(process.kill)
        other.close()
    return _parent


def _serve(channel: socket.socket) -> int:
    import importlib

    from pipelines.warm import wire
    from stages.engines.processes import determinism

    determinism.before_import()
    for name in _LIBRARIES:
        importlib.import_module(name)
    # With its care for what need not be imported; then none of our own code is left.
    importlib.import_module("stages.engines.models.lean_transformers")
    importlib.import_module("transformers.models.llama.modeling_llama")
    for name in [name for name in sys.modules if name.split(".")[0] in ("pipelines", "stages")]:
        del sys.modules[name]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
    while (received := wire.receive(channel)) is not None:
        message, files = received
        if not os.fork():
            channel.close()
            return _be_server(message, files[0])
        for file in files:
            os.close(file)
        wire.send(channel, {})
    return 0


def _be_server(message: dict, log: int) -> int:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, log), (2, log)):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["root"])
    sys.path[:] = [
        message["code"],
        *(path for path in sys.path if "site-packages" in path or "lib/python" in path),
    ]
    words = ["-m", "pipelines.warm.server", message["folder"], message["kind"]]
    sys.orig_argv[:] = [sys.executable, *words, ""]
    from pipelines.warm.identity import Kind
    from pipelines.warm.server import main

    return main(Path(message["folder"]), Kind(message["kind"]))


if __name__ == "__main__":
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
