"""Questions about a real history: every way to name a thing, and what the answers say."""

import json
from pathlib import Path

from tests.lineage.conftest import Asker


def outs_of(root: Path, stage: str) -> dict[str, str]:
    """The hashes that the newest record of a stage names."""
    records = sorted(
        root.glob(f".lockstep/jobs/{stage}/*/record.json"), key=lambda p: p.stat().st_mtime
    )
    outs: dict[str, str] = json.loads(records[-1].read_text())["outs"]
    return outs


MODEL = "artifacts/policies/iter_002/model"


def test_an_artifact_is_found_by_every_name_it_has(ask: Asker) -> None:
    digest = outs_of(ask.root, "policy_update@iter_002")[MODEL]
    names = [
        "policy@iter_002",
        MODEL,
        f"{MODEL}/",
        f"./{MODEL}",
        str(ask.root / MODEL),
        f"{MODEL}/config.json",
        digest,
        digest.removesuffix(".dir"),
        digest[:6],
        digest[:12].upper(),
        "HEAD:policy@iter_002",
        f"faster:{MODEL}",
    ]
    for name in names:
        target = ask(name, "--json", "--depth", "0").json["target"]
        assert (target["path"], target["hash"]) == (MODEL, digest), name
