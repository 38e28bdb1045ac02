"""A stage's code is what it imports, each file by what it does, whatever its comments say."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity import code as identity
from pipelines.identity.code import (
    changed_files,
    code_map,
    code_version,
    map_path,
    map_text,
    version_of,
)
from pipelines.identity.map_files import KnownMaps, refuse_other_map, write_maps
from pipelines.identity.syntax import digest
from stages.contracts.catalog import STAGES

ROOT = Path(__file__).resolve().parents[2]
MODULES = list(dict.fromkeys(stage.module for stage in STAGES.values()))

EVERYTHING = r'''
from __future__ import annotations

import re as regex

LIMIT: int = 3
DASH = "\N{EM DASH}" "\U0001fae8" 'é'
RAW, BYTES = r"\d+", b"\x00a"


@regex.compile
def described(first, /, second=1.5, *rest: int, width: int = 8, **more: str) -> str:
    """Not counted."""
    text = f"{first!r:>{width}.{LIMIT}}" "plain" f"{{}}" rf"\d{second:,}" f""
    if (count := len(rest)) > 2 and not -count < +LIMIT <= ~3:
        text += f"{count=}" f"{second = !s:^10}" f'{more["k"]:}' f"{text}{text}"
    return text


async def matched(value: int | None, *, deep: bool = ...) -> object:
    match value:
        case {"kind": [1, *others], **left} if others:
            return lambda x, y=2: (x, y, left)
        case Point(x=0) | None | -1.5j:
            yield [item async for item in value if item]
        case _:
            del value.x[1:2, ::3]
    async with value as a, deep as b:
        await a
    try:
        pass
    except* (OSError, ValueError) as group:
        raise RuntimeError from group
    print(*value, **{"a": 1, **deep}, end="")


class Point(tuple, metaclass=type):
    """Not counted."""

    x: int = 0
    """Not counted."""
    y = u"kept"
'''
"""Syntax whose tree differs between Python 3.11, 3.12 and 3.13, and what stages are made of."""


def digest_of(text: str) -> str:
    return digest(ast.parse(text))


def test_every_python_gives_a_text_the_same_digest() -> None:
    """Clones with other Pythons share results: the maps are in git."""
    assert digest_of(EVERYTHING) == "635b114a10d3d5011f44c2a969a1b1cb"


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_another_python_gives_the_repository_the_same_digests(version: str) -> None:
    program = shutil.which(f"python{version}")
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    found = program and subprocess.run([program, "-c", ask], capture_output=True, text=True)
    if not program or not found or found.stdout.strip() != version:
        pytest.skip(f"there is no Python {version}")
    told = (
        "import ast, runpy, sys\n"
        "digest = runpy.run_path('pipelines/identity/syntax.py')['digest']\n"
        "for name in sys.argv[1:]: print(digest(ast.parse(open(name, 'rb').read())))"
    )
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "stages").rglob("*.py"))
    done = subprocess.run(
        [program, "-c", told, *files], cwd=ROOT, capture_output=True, text=True, check=True
    )
    here = [digest(ast.parse((ROOT / name).read_bytes())) for name in files]
    assert done.stdout.split() == here


BEFORE = '''
"""What it is."""
LIMIT = 3
"""How many."""

@cached
def take(first, last=2):
    """Take some."""
    text = f"{first:>8}"
    if first < last:
        return {"text": text, "more": """Take some."""}

class Taker:
    """Who takes."""

    name: str = "a"
    """What it is called."""
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 3  # no more"),
        ("LIMIT = 3", "# no more\n\n\nLIMIT   =   3"),
        ('"""What it is."""', '"""What it was."""'),
        ('"""What it is."""', ""),
        ('"""How many."""', '"""How many, at most."""'),
        ('    """Take some."""\n    text', '    """Take.\n\n    All.\n    """\n    text'),
        ('"""Who takes."""', "'Who took.'"),
        ('"""What it is called."""', ""),
        ('f"{first:>8}"', "(f'{first:>8}')"),
        ('"text": text, ', '\n"text":\ntext,\n'),
        ('name: str = "a"', "name: str = u'a'"),
    ],
)
def test_what_only_people_read_changes_no_digest(old: str, new: str) -> None:
    assert BEFORE.count(old) == 1
    assert digest_of(BEFORE.replace(old, new)) == digest_of(BEFORE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("LIMIT = 3", "LIMIT = True"),
        ("first < last", "first <= last"),
        ("last=2", "last=3"),
        ("last=2", "*, last=2"),
        ("@cached", "@kept"),
        ("@cached\n", ""),
        ("{first:>8}", "{first:>9}"),
        ("{first:>8}", "{first!r:>8}"),
        ('f"{first:>8}"', 'f"{first:>8} "'),
        ('f"{first:>8}"', '"{first:>8}"'),
        ('"more": """Take some."""', '"more": """Take all."""'),
        ('    text = f"', '    last\n    """Take."""\n    text = f"'),
        ('name: str = "a"', 'name: str = b"a"'),
        ('name: str = "a"', 'name: int = "a"'),
        ("class Taker", "class Taker(tuple)"),
        ("def take", "async def take"),
    ],
)
def test_what_the_code_does_changes_the_digest(old: str, new: str) -> None:
    assert BEFORE.count(old) == 1
    assert digest_of(BEFORE.replace(old, new)) != digest_of(BEFORE)


def test_sft_does_not_depend_on_the_code_of_the_loop() -> None:
    files = code_map(ROOT, "stages.sft")
    assert "stages/sft.py" in files
    assert not [file for file in files if "policy_update" in file or "generation" in file]


def test_reading_a_format_of_data_is_the_code_of_prepare_alone() -> None:
    """How ShareGPT is parsed is no reason to sample anew."""
    formats = (ROOT / "stages/data/formats").glob("*.py")
    names = {path.relative_to(ROOT).as_posix() for path in formats}
    assert {m for m in MODULES if names & set(code_map(ROOT, m))} == {"stages.prepare"}


def test_code_files_follow_imports_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "stages" / "inner").mkdir(parents=True)
    write = {
        "stages/a.py": "import stages.b\nfrom stages import c\n",
        "stages/b.py": "from stages.inner.d import thing\n",
        "stages/c.py": "def f():\n    from stages import e\n",
        "stages/inner/d.py": "import json\n",
        "stages/e.py": "",
        "stages/unused.py": "",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    assert list(code_map(tmp_path, "stages.a")) == sorted(set(write) - {"stages/unused.py"})


def test_packages_of_the_stages_hold_docstrings_only() -> None:
    """Which is why they are in no map, and importing one of their modules runs nothing else."""
    for path in (ROOT / "stages").rglob("__init__.py"):
        assert digest(ast.parse(path.read_bytes())) == digest_of(""), path


def test_every_other_file_of_the_stages_is_in_a_map() -> None:
    others = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "stages").rglob("*.*")
        if path.suffix not in (".py", ".pyc")
    }
    assert others == {
        path for module in MODULES for path in code_map(ROOT, module) if not path.endswith(".py")
    }


def test_a_file_that_a_module_names_counts_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/a.py").write_text('FILES = ("page.j2",)\n')
    maps = []
    for text in ("<p>", "<p>", "<p> "):
        (tmp_path / "stages/page.j2").write_text(text)
        maps.append(code_map(tmp_path, "stages.a"))
    assert maps[0] == maps[1]
    assert changed_files(maps[1], maps[2]) == {"stages/page.j2": "modified"}


@pytest.mark.parametrize("module", MODULES)
def test_the_maps_in_git_are_those_of_the_code(module: str) -> None:
    written = (ROOT / map_path(module)).read_text()
    assert changed_files(json.loads(written), code_map(ROOT, module)) == {}, "run `dvc repro code`"
    assert written == map_text(code_map(ROOT, module))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """One stage, and the file that it imports."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/sft.py").write_text("from stages import loop\n")
    (tmp_path / "stages/loop.py").write_text("STEPS = 1\n")
    return Repository(tmp_path)


def test_a_map_that_is_behind_is_refused_by_the_file(repository: Repository) -> None:
    root = repository.root

    def check() -> None:
        refuse_other_map(root, "sft", "stages.sft", code_map(root, "stages.sft"))

    with pytest.raises(LockstepError, match=r"code/sft\.json .*stages/loop\.py.*dvc repro code"):
        check()
    write_maps(repository, ["stages.sft"])
    check()
    (root / "stages/loop.py").write_text("STEPS = 1  # at most\n")
    check()
    (root / "stages/loop.py").write_text("STEPS = 2\n")
    with pytest.raises(LockstepError, match=r"sft: code/sft\.json .*\(stages/loop\.py\)"):
        check()


def test_what_is_remembered_of_files_follows_their_bytes(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_known", {})
    write_maps(repository, ["stages.sft"])
    first = version_of(json.loads((repository.root / "code/sft.json").read_text()))
    monkeypatch.setattr(identity, "_known", {})
    monkeypatch.setattr(ast, "parse", lambda _: pytest.fail("it is remembered"))
    assert code_version(repository.root, "stages.sft", repository.home) == first
    monkeypatch.undo()
    (repository.root / "stages/loop.py").write_text("STEPS = 2\n")
    assert code_version(repository.root, "stages.sft", repository.home) != first


def test_maps_of_before_are_found_by_their_hash(repository: Repository) -> None:
    """By the copy that was kept; without it, in any commit."""
    root = repository.root

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=root, check=True)

    git("init", "-q")
    versions = []
    for steps in (1, 2, 3):
        (root / "stages/loop.py").write_text(f"STEPS = {steps}\n")
        write_maps(repository, ["stages.sft"])
        versions.append(code_version(root, "stages.sft"))
        if steps < 3:
            git("add", "code")
            git("commit", "-qm", f"{steps} steps")
    maps = KnownMaps(repository)
    found = [maps.get(version) for version in versions]
    assert [version_of(code) for code in found if code] == versions
    assert changed_files(found[0] or {}, found[1] or {}) == {"stages/loop.py": "modified"}
    shutil.rmtree(repository.home)
    maps = KnownMaps(repository)
    assert [maps.get(version) for version in versions] == found
    assert maps.get("0" * 32) is None


def test_code_that_python_cannot_read_is_named(repository: Repository) -> None:
    (repository.root / "stages/loop.py").write_text("STEPS = = 1\n")
    with pytest.raises(LockstepError, match=r"stages/loop\.py: Python cannot read it: .*line 1"):
        code_map(repository.root, "stages.sft")


def test_the_command_writes_every_map(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "stages", tmp_path / "stages")
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    words = [sys.executable, "-m", "pipelines", "code"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    written = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "code").iterdir()}
    assert written == set(map(map_path, MODULES))
