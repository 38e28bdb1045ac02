"""Small work done over and over, each time with another fault, each time by a child of one process.

Run under the fault library as `python drill.py WHAT FOLDER SEED CASES`. A case does the work with a
fault, looks whether anything half-written passes for whole, does the work again in peace, and looks
whether the result is the one without faults. Prints a line for each case that went wrong, and at
the end how many faults there were.
"""

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.config.profiles import ExecutorKind
from pipelines.identity.spec import Spec
from pipelines.ledger.entry import Ledger
from pipelines.ledger.publish import publish
from pipelines.ledger.state import State
from pipelines.worker.worker import run_attempt
from stages.contracts.catalog import bind
from tests.ledger_values import ORIGIN, launch

CALLS = ("write", "fsync", "rename", "open", "mkdir", "ftruncate", "link", "write,open,rename")
ERRORS = (errno.ENOSPC, errno.EIO)
STEPS, PARTS, REPEATS = 3, 4, 5000
WHOLE = PARTS * REPEATS * len("model one 0")


class WorkFailed(Exception):
    """What a user would read."""


def compute(config: Any, inputs: Any, out: dict[str, Path], ctx: Any) -> dict[str, float]:  # noqa: ARG001
    """A stage that writes as stages do: logs, a table, folders with files."""
    ctx.resume_at(0)
    for step in range(1, STEPS + 1):
        ctx.log(step, {"loss": 1 / step})
        ctx.progress(step, STEPS, loss=1 / step)
    ctx.table("samples", [{"text": "a"}, {"text": "b"}])
    for path in out.values():
        path.mkdir()
        for name in ("one", "two"):
            with (path / name).open("wb") as file:
                for part in range(PARTS):
                    file.write(f"{path.name} {name} {part}".encode() * REPEATS)
    return {"loss": 0.5}


def stage(root: Path) -> None:
    """A stage from the ledger to the workspace, as its driver and its worker do it."""
    repository = Repository(root)
    bound = bind("sft", load_params(root))
    spec = Spec(
        stage="sft",
        name="sft",
        key=None,
        config=bound.config.model_dump(mode="json", by_alias=True),
        code="c0de",
        inputs={},
        outs=dict(bound.outs),
        metrics=bound.metrics,
    )
    entry = Ledger(repository.jobs).find_or_create(spec, ORIGIN)
    with entry.lease():
        if entry.state() not in (State.COMPLETED, State.PUBLISHED):
            attempt = entry.new_attempt(launch(ExecutorKind.DEBUG, root=root))
            run_attempt(str(attempt.folder))
            if entry.state() is not State.COMPLETED:
                raise WorkFailed(attempt.result.error if attempt.result else "")
        publish(root, entry)


def stage_is_whole(root: Path) -> str | None:
    """What of a disturbed stage passes for whole and is not."""
    for path in root.rglob("*.json"):
        try:
            json.loads(path.read_text() if not path.name.startswith(".") else "0")
        except ValueError:
            return f"{path} is there and is not whole"
    for entry in Ledger(root / ".lockstep/jobs").entries():
        for out in (entry.out, *(root / path for path in entry.spec.outs.values())):
            files = [path for path in sorted(out.rglob("*")) if path.is_file()]
            data = [path for path in files if path.name in ("one", "two")]
            if data and any(path.stat().st_size < WHOLE for path in data):
                return f"{out} is there and is not whole"
    return None


def checkpoints(root: Path) -> None:
    """Checkpoints at three steps, each with what makes the next one."""
    import torch

    from stages.checkpoint import load_checkpoint, save_tensors

    root.mkdir(exist_ok=True)
    scratch = root / "scratch"
    scratch.mkdir(exist_ok=True)
    found = load_checkpoint(scratch)
    step, weights = (found.step, found.tensors["w"].whole()) if found else (0, torch.zeros(4000))
    while step < STEPS:
        step, weights = step + 1, weights * 1.5 + 1
        save_tensors(scratch, step, {"w": weights}, {"step": step})
        (root / "saved").write_text(str(step))
    (root / "artifacts").mkdir(exist_ok=True)
    (root / "artifacts/weights").write_bytes(weights.numpy().tobytes())


def checkpoints_are_whole(root: Path) -> str | None:
    """Whether what was saved with success is still to be had."""
    from stages.checkpoint import load_checkpoint

    saved = int((root / "saved").read_text() or 0) if (root / "saved").exists() else 0
    found = load_checkpoint(root / "scratch") if (root / "scratch").exists() else None
    have = found.step if found else 0
    if have < saved:
        return f"step {saved} was saved, and the newest that can be read is {have}"
    return None


WORK: dict[str, tuple[Callable[[Path], None], Callable[[Path], str | None]]] = {
    "stage": (stage, stage_is_whole),
    "checkpoints": (checkpoints, checkpoints_are_whole),
}


def result(root: Path) -> str:
    digest = hashlib.sha256()
    for folder in ("artifacts", "metrics"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def in_a_child(work: Callable[[Path], None], root: Path, fault: str = "") -> str | None:
    """Do it in a process of its own; what it said where it failed."""
    said = root.with_suffix(".said")
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = 0
        try:
            library.chaos_arm(fault.encode())
            work(root)
        except (OSError, WorkFailed) as error:
            code = 1
            library.chaos_arm(b"")
            said.write_text(str(error))
        except BaseException:
            code = 2
            library.chaos_arm(b"")
            said.write_text(traceback.format_exc())
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return said.read_text() if status else None


def case(work: str, root: Path, draw: random.Random, expected: str) -> tuple[bool, str | None]:
    """One fault: whether it came to anything, and what was wrong about it."""
    function, whole = WORK[work]
    calls, number = draw.choice(CALLS), draw.choice(ERRORS)
    first, times = draw.randrange(1, 40 if "write" in calls else 15), draw.choice([0, 1])
    fault = f"{calls} {number} {first} {times} {root}"
    begin(root)
    said = in_a_child(function, root, fault)
    problem = None
    if said is not None and (os.strerror(number) not in said or "Traceback" in said):
        problem = f"an unclear message: {said}"
    elif said is not None and work == "stage" and str(root) not in said:
        problem = f"a message that names no file: {said}"
    problem = problem or whole(root)
    again = in_a_child(function, root)
    if again is not None:
        problem = problem or f"in peace again: {again}"
    elif result(root) != expected:
        problem = problem or "other bytes"
    shutil.rmtree(root)
    return said is not None, f"{fault}: {problem}" if problem else None


def begin(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "params.yaml").write_text("seed: 17\n")
    (root / "dvc.yaml").write_text("stages: {}\n")


def main(work: str, folder: str, seed: str, cases: str) -> None:
    sys.modules["stages.sft"] = fake = types.ModuleType("stages.sft")
    fake.run = compute  # type: ignore[attr-defined]
    if work == "checkpoints":
        import stages.checkpoint  # noqa: F401  (torch takes seconds: once, before the children)
    else:
        # What is read, built and looked up once in a process, every child has from here.
        first = Path(folder) / "first"
        begin(first)
        with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
            stage(first)
    peaceful = Path(folder) / "peaceful"
    begin(peaceful)
    assert in_a_child(WORK[work][0], peaceful) is None, peaceful.with_suffix(".said").read_text()
    expected = result(peaceful)
    draw, faults = random.Random(int(seed)), 0
    for number in range(int(cases)):
        failed, problem = case(work, Path(folder) / f"case-{number}", draw, expected)
        faults += failed
        if problem:
            print(f"case {number}: {problem}", flush=True)
    print(f"{faults} faults")


if __name__ == "__main__":
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    main(*sys.argv[1:])
