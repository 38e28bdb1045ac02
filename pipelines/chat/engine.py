"""The process in which a policy answers, seen from the control plane.

It is started with the policy's files, every byte of which is compared with the recorded hash, as a
job does with its inputs. It answers one question at a time, and ends when it is closed, or with
this process, whatever ends that.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.chat.dialogue import Answer, Message, Options
from pipelines.chat.policies import Policy
from pipelines.identity.hashing import hash_bytes
from stages.contracts.params import Params

MODULE = "stages.chat.engine"
CODE = Path(__file__).resolve().parents[2]
"""Where both planes can be imported from."""
END_S = 5.0
LAST_LINES = 4


class Engine:
    """One policy, loaded."""

    def __init__(self, policy: Policy, params: Params) -> None:
        """Returns when it can answer; LockstepError where it cannot."""
        self.policy = policy
        self._asking = threading.Lock()
        self._writing = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-chat-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process: subprocess.Popen[str] | None = None
        try:
            folder = self._named_files()
            self._process = _start(self._log)
            order = {"engine": params.rollout.engine, "precision": params.precision}
            self._send({"folder": str(folder), **order})
            self.facts: Mapping[str, Any] = self._heard()["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def policy_hash(self) -> str:
        """Of the weights, as rows of rollouts have it."""
        return str(self.facts["policy_hash"])

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def answer(
        self, messages: Sequence[Message], options: Options, name: str
    ) -> Iterator[str | Answer]:
        """The text of the answer, piece by piece, and then the whole of it.

        By its name, which no other answer has, it can be stopped; whoever does not go on to the end
        has stopped it, too.
        """
        with self._asking:
            is_over = False
            try:
                self._send({"ask": name, "messages": list(messages), **options.order()})
                while not is_over:
                    heard = self._heard(name)
                    is_over = "answer" in heard
                    yield Answer(**heard["answer"]) if is_over else heard["said"]
            finally:
                if not is_over:
                    self.stop(name)

    def stop(self, name: str) -> None:
        """End an answer, from any thread, even before it begins; what was said until then is it."""
        with suppress(LockstepError):
            self._send({"stop": name})

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def _named_files(self) -> Path:
        """A folder with the policy's files; in DVC's cache they are named by their hashes."""
        folder = Path(self._folder.name) / "model"
        for name, path in self.policy.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(path.resolve())
        digest = hash_bytes(folder)
        if digest != self.policy.artifact.hash:
            raise LockstepError(
                f"{self.policy.name}: the files of {self.policy.artifact.path} have the hash "
                f"{digest}, and {self.policy.artifact.hash} was recorded: `lockstep verify` names "
                "the damaged one and the command that fixes it"
            )
        return folder

    def _send(self, message: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise LockstepError(f"{self.policy.name}: its process has ended: ask again")
        with self._writing, suppress(BrokenPipeError):  # why it ended is told by who reads
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _heard(self, name: str | None = None) -> dict[str, Any]:
        """What is said next in an answer; what is left of one that nobody heard to its end is
        passed over."""
        while True:
            process = self._process
            line = process.stdout.readline() if process is not None and process.stdout else ""
            try:
                heard: dict[str, Any] = json.loads(line)
            except ValueError:
                raise LockstepError(self._how_it_ended()) from None
            if heard.get("id") != name:
                continue
            if "refused" in heard:
                raise LockstepError(f"{self.policy.name}: {heard['refused']}")
            return heard

    def _how_it_ended(self) -> str:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if lines and lines[-1].startswith("ModuleNotFoundError"):
            return (
                f"{self.policy.name}: {lines[-1]}: to answer, a policy needs the compute plane's "
                "packages (pip install -e '.[train]')"
            )
        said = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
        return f"{self.policy.name}: its process has ended{said or ' without a word'}"


def _start(log: Any) -> subprocess.Popen[str]:
    paths = [str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        # -P: a folder called `stages` where we happen to be is not the code that is meant.
        [sys.executable, "-P", "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        encoding="utf-8",
        # Ctrl-C is for the conversation, which stops an answer by asking.
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
