"""Whatever a stage's processes write, and however they end, its logs have it without secrets."""

import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipelines.base.redacted_log import open_log
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {
    "MY_API_KEY": "abc-abc-very",
    "DB_PASS": "abc-abc-very-much",
    "LANG_KEY": "Schl\u00fcsselw\u00f6rter",
}
BEGIN = """
import ctypes, os, signal, subprocess, sys, time
from pipelines.base.redacted_log import redacted_log
key = os.environ["MY_API_KEY"]
"""


def start(tmp_path: Path, program: str) -> "subprocess.Popen[bytes]":
    """A process that writes to `out` and `err`, as a job does."""
    with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
        return subprocess.Popen(
            [sys.executable, "-c", BEGIN + program],
            cwd=ROOT,
            env={**os.environ, **SECRETS, "TEST_FOLDER": str(tmp_path)},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def run(tmp_path: Path, program: str) -> tuple[str, str]:
    assert start(tmp_path, program).wait() == 0
    return (tmp_path / "out").read_text(), (tmp_path / "err").read_text(errors="replace")


def test_python_c_and_other_programs_write_no_secret(tmp_path: Path) -> None:
    out, err = run(
        tmp_path,
        "with redacted_log():\n"
        "    print('python', key)\n"
        "    print('python', key, file=sys.stderr)\n"
        "    sys.stdout.flush()\n"
        "    ctypes.CDLL(None).printf(b'c %s\\n', key.encode())\n"
        "    ctypes.CDLL(None).fflush(None)\n"
        "    subprocess.run('echo shell $MY_API_KEY $DB_PASS; echo $LANG_KEY >&2', shell=True)\n"
        "print('afterwards')\n",
    )
    assert out == "python ***\nc ***\nshell *** ***\nafterwards\n"
    assert err == "python ***\n***\n"


def test_a_secret_in_pieces_is_starred_and_nothing_else_is_lost(tmp_path: Path) -> None:
    out, _ = run(
        tmp_path,
        "with redacted_log():\n"
        "    os.write(1, b'|')\n"
        "    while not os.path.getsize(os.environ['TEST_FOLDER'] + '/out'):\n"
        "        time.sleep(0.01)\n"
        "    for piece in (b'a', b'bc-', b'abc-ver', b'y', b'-mu', b'ch|abc-ab', b'|abc-abc-'):\n"
        "        os.write(1, piece)\n"
        "        time.sleep(0.02)\n"
        "    text = 'x://me:word@host \\u00e9 ' + os.environ['LANG_KEY']\n"
        "    for byte in text.encode() + b'\\xff:':\n"
        "        os.write(2, bytes([byte]))\n",
    )
    assert out == "|***|abc-ab|abc-abc-"
    assert (tmp_path / "err").read_bytes() == b"x://***@host \xc3\xa9 ***\xff:"


def test_the_log_is_whole_at_the_end_though_a_child_goes_on(tmp_path: Path) -> None:
    """The child has what this process wrote to, and may write on."""
    run(
        tmp_path,
        "with redacted_log():\n"
        "    child = subprocess.Popen(['sh', '-c', 'read word; echo $MY_API_KEY late'],\n"
        "                             stdin=subprocess.PIPE)\n"
        "    os.write(1, b'last words ' + key.encode() + b' abc-')\n"
        "written = open('/proc/self/fd/1').read()\n"
        "assert written == 'last words *** abc-', written\n"
        "child.communicate(b'go\\n')\n",
    )
    until(lambda: (tmp_path / "out").read_text().endswith("abc-*** late\n"), "the child's words")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2])
def test_the_last_words_of_a_killed_process_are_kept(tmp_path: Path, how: signal.Signals) -> None:
    process = start(
        tmp_path,
        "with redacted_log():\n"
        "    os.write(1, b'last words ' + key.encode() + b' abc')\n"
        "    os.write(2, b'x' * 60_000)\n"
        f"    os.kill(0, {int(how)})\n"
        "    time.sleep(4000)\n",
    )
    assert process.wait() == -how
    written = "last words *** abc"
    until(lambda: (tmp_path / "out").read_text() == written, "what it wrote last is in the log")
    until(lambda: (tmp_path / "err").stat().st_size == 60_000, "all of it")


def test_signals_to_every_process_of_a_job_leave_the_log_open(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "with redacted_log():\n"
        "    told = []\n"
        "    signal.signal(signal.SIGTERM, lambda *_: told.append(os.write(1, b', stopping')))\n"
        "    os.write(1, b'ready')\n"
        "    while not told:\n"
        "        time.sleep(0.01)\n",
    )
    until(lambda: (tmp_path / "out").read_text() == "ready", "it works", at_work=process)
    for each in [process.pid, *redacting(tmp_path)]:
        os.kill(each, signal.SIGTERM)
    assert process.wait() == 0
    assert (tmp_path / "out").read_text() == "ready, stopping"
    until(lambda: not redacting(tmp_path), "nothing is left of it")


def redacting(tmp_path: Path) -> list[int]:
    """The processes that write to these logs."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "pipelines.base.redacting_process" in words:
                found += [process.pid] * (process.environ().get("TEST_FOLDER") == str(tmp_path))
    return found


def test_an_unfinished_line_is_in_the_log_at_once(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "with redacted_log():\n    os.write(1, b'50 %')\n    time.sleep(4000)\n",
    )
    until(lambda: (tmp_path / "out").read_text() == "50 %", "progress", at_work=process)
    process.kill()
    process.wait()


def test_logs_are_closed_to_others(tmp_path: Path) -> None:
    run(tmp_path, "with redacted_log():\n    print(1)\n")
    open_log(tmp_path / "new").close()
    for name in ("out", "err", "new"):
        assert not stat.S_IMODE((tmp_path / name).stat().st_mode) & ~0o640
