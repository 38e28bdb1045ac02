"""Files read whole and in parallel."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.identity import digests as reading
from pipelines.identity.digests import Digest, Unreadable, digests


def test_it_hashes_what_is_there_and_leaves_out_what_is_not(tmp_path: Path) -> None:
    contents = {f"f{size}": os.urandom(size) for size in (0, 1, 1 << 20, (1 << 20) + 7)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    seen: list[tuple[int, int]] = []
    paths = [*(tmp_path / name for name in contents), tmp_path / "none", tmp_path / "f0" / "below"]
    found = digests(paths, lambda done, total: seen.append((done, total)))
    expected = {n: (hashlib.md5(c).hexdigest(), len(c)) for n, c in contents.items()}
    for path, digest in found.items():
        assert isinstance(digest, Digest)
        assert (digest.md5, digest.size) == expected.pop(path.name)
    assert not expected
    total = sum(map(len, contents.values()))
    assert seen[-1] == (total, total)


def test_a_file_with_two_names_is_read_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"x" * 1000)
    os.link(first, second)
    seen: list[int] = []
    found = digests([first, second], lambda done, _: seen.append(done))
    assert found[first] == found[second]
    assert seen[-1] == 1000


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    found = digests([tmp_path, tmp_path / "loop"])
    assert isinstance(found[tmp_path], Unreadable)
    assert found[tmp_path].reason == "Is a directory"
    assert isinstance(found[tmp_path / "loop"], Unreadable)


def test_an_interrupt_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # a hole: takes no room, and half an hour to hash
    monkeypatch.setattr(reading, "_TICK_S", 0.01)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        digests([tmp_path / "huge"], interrupt)


COUNT_THREADS = """
import os, sys, threading
from pathlib import Path
from pipelines.identity.digests import digests
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
seen = []
digests(Path(sys.argv[1]).iterdir(), lambda *_: seen.append(threading.active_count() - 1))
print(max(seen))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_job_hashes_with_the_cores_it_was_given_not_with_all_of_the_node(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", COUNT_THREADS, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(said) == 1
