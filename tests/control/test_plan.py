"""A plan says what DVC's own status says, and what DVC then restores instead of running."""

import contextlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from dvc.utils.serialize import dumps_yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from pipelines.base.errors import LockstepError
from pipelines.dvc_repo import plan
from pipelines.dvc_repo.definitions import Unsupported, read_definitions
from pipelines.dvc_repo.graph import connect, nodes_of, open_repo, stages_in_order
from pipelines.dvc_repo.lock_order import order_lock
from pipelines.dvc_repo.lock_text import parse_lock
from pipelines.dvc_repo.plan import PlannedStage, make_plan

ROOT = Path(__file__).resolve().parents[2]
GRAPH = """\
stages:
  prepare:
    cmd: python work.py prepare data/base
    deps: ["${folder}", work.py]
    params: [seed]
    outs: [made/base]
    metrics: [{metrics/prepare.json: {cache: false}}]
  free:
    cmd: python work.py free made/free
    outs: [made/free]
  step:
    foreach: ${steps}
    do:
      cmd: python work.py ${key} ${item.from}
      deps: ["made/${item.from}", work.py, tool.sh]
      params: [step, seed]
      outs: ["made/${key}"]
      metrics: [{"metrics/steps/${key}.json": {cache: false}}]
  keeps:
    cmd: python work.py keeps made/base
    deps: [made/base]
    outs: [{made/keeps: {persist: true}}]
  report:
    cmd: python work.py report made/base
    deps: [metrics/steps, made/two/file, work.py]
    params: [steps]
    outs: [made/report]
"""
PARAMS = "seed: 1\nfolder: data\nstep: {size: 0.5, sizes: [1, 2]}\n"
STEPS = "steps: {one: {from: base}, two: {from: one}, three: {from: two}}\n"
WORK = """\
import json, sys
from pathlib import Path
name = sys.argv[1]
with open("ran.log", "a") as log:
    log.write(name + "\\n")
seed = Path("params.yaml").read_text().split("\\n")[0]
made = Path("made", name)
made.mkdir(parents=True, exist_ok=True)
(made / "file").write_text(name + seed)
(made / "sub").mkdir(exist_ok=True)
(made / "sub" / "more").write_text(sys.argv[2])
where = Path("metrics") if name == "prepare" else Path("metrics/steps")
if name == "prepare":
    made.rename("made/base")
if name not in ("free", "keeps", "report"):
    where.mkdir(parents=True, exist_ok=True)
    (where / (name + ".json")).write_text(json.dumps({"name": name, "seed": seed}))
"""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("dvc").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small graph that has run; a copy of it runs on from there."""
    root = tmp_path_factory.mktemp("done")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    Repo.init(str(root)).close()
    (root / "data").mkdir()
    (root / ".dvcignore").write_text("# not data\n__pycache__\n*.pyc\n")
    for name, text in {
        "data/a": "a",
        "data/b": "b",
        "work.py": WORK,
        "tool.sh": "true",
        "params.yaml": PARAMS + STEPS,
        "dvc.yaml": GRAPH.replace("python", sys.executable),
        ".gitignore": "/ran.log\n/.lockstep\n/made\n",
    }.items():
        (root / name).write_text(text)
    (root / "tool.sh").chmod(0o755)
    repro(root)
    return root


@pytest.fixture
def project(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "project", symlinks=True))


def repro(root: Path) -> list[str]:
    """Bring all up to date with DVC; the stages whose commands ran."""
    log = root / "ran.log"
    log.unlink(missing_ok=True)
    with contextlib.chdir(root), Repo(str(root)) as repo:
        repo.reproduce()
    return log.read_text().split() if log.exists() else []


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).unlink()  # it may be a link into DVC's cache
        (root / name).write_text(text.replace(old, new))

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(text)

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda root: [change(root) for change in changes] and None


def lose_object(path: str) -> Callable[[Path], None]:
    """Remove what DVC's cache has of an output, or of a file in one."""

    def change(root: Path) -> None:
        folder, _, file = path.partition(":")
        lock = YAML(typ="safe").load((root / "dvc.lock").read_text())
        outs = [out for stage in lock["stages"].values() for out in stage["outs"]]
        md5 = next(out["md5"] for out in outs if out["path"] == folder)
        place = root / ".dvc/cache/files/md5"
        if file:
            listed = json.loads((place / md5[:2] / md5[2:]).read_text())
            md5 = next(row["md5"] for row in listed if row["relpath"] == file)
        (place / md5[:2] / md5[2:]).unlink()

    return change


CHANGES = {
    "nothing that counts": both(
        write("data/a", "a"), write("data/__pycache__/x.py", "x"), write("data/x.pyc", "x")
    ),
    "params": both(
        edit("params.yaml", "size: 0.5", "size: 0.6"), edit("params.yaml", "seed: 1", "seed: true")
    ),
    "a list in a param": edit("params.yaml", "[1, 2]", "[1, 3]"),
    "other params": both(
        edit("params.yaml", "step: {size: 0.5, sizes: [1, 2]}", "other: 1"),
        edit("dvc.yaml", "params: [seed]", "params: [seed, folder]"),
    ),
    "another tree": both(
        edit("params.yaml", "three: {from: two}", "three: {from: one}, x: {from: two}"),
        edit("params.yaml", "one: {from: base}", "first: {from: base}, one: {from: first}"),
    ),
    "code and data": both(
        edit("work.py", "import json", "import  json"),
        write("data/a", "other"),
        write("data/sub/c", "c"),
    ),
    "no code, no data": both(remove("work.py"), remove("data")),
    "another folder": both(write("more/a", "a"), edit("params.yaml", ": data", ": more")),
    "outputs": both(
        remove("made/two/file"),
        write("made/one/file", "other"),
        write("made/three/more", "other"),
        write("metrics/steps/one.json", "{}"),
        remove("metrics/steps/two.json"),
    ),
    "another command": both(
        edit("dvc.yaml", "work.py report", "work.py  report"),
        lambda root: (root / "tool.sh").chmod(0o644),
    ),
    "no lock": remove("dvc.lock"),
    "an edited lock": both(
        edit("dvc.lock", "seed: 1", "seed: 3"),
        edit("dvc.lock", "  step@one:", "  step@gone:"),
        lambda root: edit_a_hash(root),
    ),
    "objects of the cache": both(lose_object("made/one"), lose_object("made/base:file")),
    "no cache": remove(".dvc/cache"),
    "no outputs": remove("made"),
}


def edit_a_hash(root: Path) -> None:
    lock = YAML(typ="safe").load((root / "dvc.lock").read_text())
    md5 = lock["stages"]["step@two"]["outs"][0]["md5"]
    edit("dvc.lock", md5, "0" * 31 + "a.dir")(root)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_plan_says_what_dvc_says(project: Path, change: Callable[[Path], None]) -> None:
    change(project)
    with open_repo(project) as repo, repo.lock:
        own = plan._plan(repo, read_definitions(repo), None)
        its = plan._plan_of_dvc(repo, None)
    assert facts(own) == facts(its)
    assert make_plan(project) == own


def facts(stages: list[PlannedStage]) -> list[tuple[str, tuple[str, ...], list[str]]]:
    return [(stage.address, stage.upstream, stage.reasons) for stage in stages]


def test_a_plan_foresees_all_that_dvc_restores(project: Path) -> None:
    """Through stages, through a folder that several fill, and into a folder that one fills."""
    edit("params.yaml", "seed: 1", "seed: 2")(project)
    assert foreseen(project) == (set(), {"prepare", *STEPS_AFTER, "keeps", "report"})
    assert set(repro(project)) == {"prepare", "one", "two", "three", "keeps", "report"}
    edit("params.yaml", "seed: 2", "seed: 1")(project)
    restored, run = foreseen(project)
    # DVC keeps no record of a stage whose outputs persist.
    assert (restored, run) == ({"prepare", *STEPS_AFTER, "report"}, {"keeps"})
    assert repro(project) == ["keeps"]
    assert foreseen(project) == (set(), set())


def test_what_is_lost_in_the_cache_is_run_and_so_is_what_comes_after(project: Path) -> None:
    edit("params.yaml", "size: 0.5", "size: 0.6")(project)
    repro(project)
    edit("params.yaml", "size: 0.6", "size: 0.5")(project)
    lose_object("made/two:sub/more")(project)
    assert foreseen(project) == ({"step@one"}, {"step@two", "step@three", "report"})
    remove("made")(project)
    restored, _ = foreseen(project)
    assert restored == {"prepare", "step@one"}
    assert {"prepare", "one"}.isdisjoint(repro(project))


@pytest.mark.parametrize("half", ["", "cmd: python\ndeps:\n- pa", "outs:\n- pa"])
def test_an_entry_of_the_run_cache_that_dvc_is_writing_is_not_there(
    project: Path, half: str
) -> None:
    edit("params.yaml", "size: 0.5", "size: 0.6")(project)
    repro(project)
    edit("params.yaml", "size: 0.6", "size: 0.5")(project)
    before = foreseen(project)
    assert before[0] == {*STEPS_AFTER, "report"}
    for folder in (project / ".dvc/cache/runs").glob("*/*"):
        (folder / ".X3p-9QmZ2bTq7yW1nRk5Vc.tmp").write_text(half)
    assert foreseen(project) == before
    for entry in (project / ".dvc/cache/runs").glob("*/*/[!.]*"):
        entry.write_text(half)  # cut by a full disk
    assert foreseen(project)[0] == set()


STEPS_AFTER = ("step@one", "step@two", "step@three")


def foreseen(root: Path) -> tuple[set[str], set[str]]:
    """What is restored and what is run."""
    stale = [stage for stage in make_plan(root) if stage.stale]
    restored = {stage.address for stage in stale if stage.cached}
    return restored, {stage.address for stage in stale} - restored


UNUSUAL = {
    "frozen": edit("dvc.yaml", "  keeps:", "  keeps:\n    frozen: true"),
    "a folder of its own": edit("dvc.yaml", "  keeps:", "  keeps:\n    wdir: ."),
    "a file of dvc add": write("data/a.dvc", "outs:\n- path: a\n"),
    "more than names": write(".dvcignore", "/data/*.pyc\n"),
    "a file of params": both(
        edit("dvc.yaml", "[steps]", "[steps, {more.yaml: [key]}]"), write("more.yaml", "key: 1")
    ),
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_what_is_not_known_here_is_left_to_dvc(
    project: Path, change: Callable[[Path], None]
) -> None:
    change(project)
    with open_repo(project) as repo, repo.lock:
        with pytest.raises(Unsupported):
            plan._plan(repo, read_definitions(repo), None)
        its = plan._plan_of_dvc(repo, None)
    assert make_plan(project) == its


def test_what_dvc_refuses_is_refused_in_its_words(project: Path) -> None:
    edit("dvc.yaml", "[made/report]", "[made/two/report]")(project)
    with pytest.raises(LockstepError, match="overlap and are thus in the same tracked directory"):
        make_plan(project)


def test_the_graph_here_is_that_of_dvc() -> None:
    with open_repo(ROOT) as repo:
        its = nodes_of(stages_in_order(repo), repo.index.graph)
        own = connect(read_definitions(repo))
    assert list(own.items()) == list(its.items())


def test_a_lock_file_is_put_in_order_as_dvc_would_write_it(project: Path) -> None:
    lock = project / "dvc.lock"
    before = lock.read_text()
    values = YAML(typ="safe").load(before)
    names = sorted(values["stages"], reverse=True)
    lock.write_text(dumps_yaml({**values, "stages": {n: values["stages"][n] for n in names}}))
    assert lock.read_text() != before
    order_lock(project)
    assert lock.read_text() == before


NAMES = st.from_regex(r"[a-z0-9_.]{1,4}(/[a-z0-9]{1,3})?|yes|null|1e3|a b|#x", fullmatch=True)
HASHES = st.from_regex(r"[0-9a-f]{32}(\.dir)?|[0-9]{32}|[0-9]{8}e[0-9]{23}", fullmatch=True)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"path": NAMES, "hash": st.just("md5"), "md5": HASHES, "size": st.integers(0, 10**12)},
        optional={"nfiles": st.integers(0, 9), "isexec": st.just(True), "files": st.just([])},
    ),
    max_size=3,
)
VALUES = st.one_of(st.integers(), st.booleans(), st.text(max_size=8), st.just([1, {"a": None}]))
STAGES = st.fixed_dictionaries(
    {"cmd": st.one_of(st.text(min_size=1, max_size=90), st.just(["a", "b"]))},
    optional={
        "deps": ITEMS,
        "params": st.just({})
        | st.fixed_dictionaries({"params.yaml": st.fixed_dictionaries({"a": VALUES})}),
        "outs": ITEMS,
    },
)


@settings(max_examples=30)
@given(st.dictionaries(NAMES, STAGES, max_size=3))
@example({"a": {"cmd": (common := ["x", "y"])}, "b": {"cmd": common}})
def test_a_lock_file_is_read_as_yaml_reads_it(stages: dict[str, Any]) -> None:
    text = dumps_yaml({"schema": "2.0", "stages": stages})
    assert parse_lock(text) == YAML(typ="safe").load(text)
