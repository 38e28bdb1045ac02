"""A policy's model card: README.md as the Hugging Face hub reads it, from the records alone.

The same policy gives the same card, byte for byte: there is no time, host or path in it.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from pipelines.export.provenance import Provenance
from pipelines.lineage.facts import defaults, value_text
from pipelines.lineage.making import flatten
from stages.contracts.params import Params
from stages.reporting.markdown import code, in_cell, plain

DATA = "artifacts/data/"
_SHORT_NUMBER = re.compile(r"^( *value: -?\d+)(e[-+]\d+)$", re.MULTILINE)
_LOADED = """\
```python
{imports}

folder = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder)
{loading}
messages = [{{"role": "user", "content": "Your question"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**inputs, max_new_tokens={tokens})
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
_IMPORTS = "from transformers import AutoModelForCausalLM, AutoTokenizer"
_LOADING = "model = AutoModelForCausalLM.from_pretrained(folder{options})"
_ADAPTER_IMPORTS = f"from peft import PeftModel\n{_IMPORTS}"
_ADAPTER_LOADING = """\
base = AutoModelForCausalLM.from_pretrained(f"{{folder}}/base"{options})
model = PeftModel.from_pretrained(base, folder)"""
_LIMITS = """\
This model is the outcome of a training run, not a product. It was measured on the held-out prompts
of its own data, and on nothing else: what it does with other prompts is not known. It may be wrong,
and may say so with confidence. A reward that is optimised is not the thing that is wanted; look at
samples, and not only at the numbers, before you rely on it. Biases of the base model and of the
data are likely to be in it. No test of its safety is part of the pipeline.

Intended use: research, and as a start for more training. Whether you may use it for more depends on
the licences of the base model and of the data."""


def render(found: Provenance, weights: Mapping[str, str], how: str, *, adapter: bool) -> str:
    """The card. `weights`: sha256 of each file of weights. `how` they were written, in words."""
    parts = [
        _front_matter(found, adapter=adapter),
        f"# {found.policy}",
        _summary(found),
        "## How to load it",
        _snippet(found, adapter=adapter),
        "## Metrics",
        _metrics(found),
        "## Data",
        _data(found),
        "## Params",
        _params(found),
        "## Hashes",
        _hashes(found, weights, how),
        "## Lineage",
        _lineage(found),
        "## Intended use and limits",
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def lineage_json(found: Provenance) -> dict[str, Any]:
    """The same for programs: each stage with its params, inputs and outputs."""
    return {
        "policy": found.policy,
        "path": found.artifact.path,
        "hash": found.artifact.hash,
        "commit": found.commit,
        "params_hash": found.params_hash,
        "given": [{"path": item.path, "hash": item.hash} for item in found.given],
        "stages": [
            {
                "stage": making.stage,
                "commit": making.commit,
                "code": making.code_version,
                "params": dict(sorted(making.params.items())),
                "inputs": dict(sorted(making.inputs.items())),
                "outs": dict(sorted(making.outs.items())),
            }
            for making in found.stages
        ],
        "evaluation": dict(found.evaluation),
        "evaluation_of_sft": dict(found.of_sft),
        "data": dict(found.data),
        "sources": [dict(source) for source in found.sources],
    }


def _front_matter(found: Provenance, *, adapter: bool) -> str:
    algorithm = found.params.get("rl.algorithm")
    values: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(filter(None, ["lockstep", "rlhf", algorithm])),
    }
    if base := _base_model(found):
        values["base_model"] = base
    for key in ("license", "license_name", "license_link", "language"):
        if key in found.base_card:
            values[key] = found.base_card[key]
    if datasets := _datasets(found):
        values["datasets"] = datasets
    if found.evaluation:
        held_out = next(
            (d for m in found.stages for p, d in m.outs.items() if p.endswith("held_out.parquet")),
            None,
        )
        dataset = {"name": "held-out prompts", "type": "lockstep-held-out"}
        if held_out:
            dataset["revision"] = held_out
        values["model-index"] = [
            {
                "name": found.policy,
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": dataset,
                        "metrics": [
                            {"type": name, "name": name, "value": value}
                            for name, value in found.evaluation.items()
                            if not name.startswith("num_")
                        ],
                    }
                ],
            }
        ]
    text = io.StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.dump(_quoted(values), text)
    # To the same older YAML 1e-05 is a text, and 1.0e-05 a number.
    spelt = _SHORT_NUMBER.sub(r"\1.0\2", text.getvalue())
    return f"---\n{spelt}---"


def _quoted(value: Any) -> Any:
    """With every text in quotes: to the hub, whose YAML is older, a bare `no` is false."""
    if isinstance(value, Mapping):
        return {str(key): _quoted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_quoted(part) for part in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) else value


def _base_model(found: Provenance) -> str | None:
    if found.params.get("model.source") != "folder":
        return None
    named = (
        found.base_card.get("base_model_name")
        or PurePosixPath(str(found.params.get("model.folder"))).name
    )
    return str(named)


def _datasets(found: Provenance) -> list[str]:
    """The hub's datasets that were trained on; a folder of files is nothing that a hub knows."""
    ids: set[str] = set()
    if found.params.get("prepare.source") == "files":
        for name, value in found.params.items():
            if not name.startswith("prepare.files.") or name.startswith("prepare.files.held_out"):
                continue
            sources = value if isinstance(value, list) else []
            ids.update(s["dataset"] for s in sources if isinstance(s, Mapping) and "dataset" in s)
            if name.endswith(".dataset"):  # one source needs no list around it
                ids.add(str(value))
    return sorted(ids)


def _summary(found: Provenance) -> str:
    algorithm = found.params.get("rl.algorithm", "?")
    how = {"sft": "supervised fine-tuning", "preference": "learning from preferences"}.get(
        found.making.name, f"reinforcement learning ({algorithm})"
    )
    start = _base_model(found)
    of = code(start) if start else "a small model built from the params"
    made = f"made from {of} by {how}"
    if found.making.name == "sft" and found.params.get("sft.epochs") == 0:
        made = f"which is {of} as it was given (sft.epochs is 0)"
    return (
        f"The policy `{found.policy}`, {made}. Everything below was written by Lockstep from the "
        "records of the run."
    )


def _snippet(found: Provenance, *, adapter: bool) -> str:
    own_code = any(name.endswith("allowed_code.json") for name in found.files)
    options = ", trust_remote_code=True" if own_code else ""
    tokens = found.params.get("rollout.max_new_tokens", 64)
    return _LOADED.format(
        imports=_ADAPTER_IMPORTS if adapter else _IMPORTS,
        loading=(_ADAPTER_LOADING if adapter else _LOADING).format(options=options),
        tokens=tokens,
    )


def _metrics(found: Provenance) -> str:
    if not found.evaluation:
        return "This policy was not evaluated."
    names = dict.fromkeys([*found.evaluation, *found.of_sft])
    is_sft = found.evaluation == found.of_sft
    heads = ["metric", found.policy] + ([] if is_sft else ["sft"])
    rows = [
        [plain(name), _number(found.evaluation.get(name))]
        + ([] if is_sft else [_number(found.of_sft.get(name))])
        for name in names
    ]
    return f"On the held-out prompts, which no training step has seen.\n\n{_table(heads, rows)}"


def _data(found: Provenance) -> str:
    prepared = [m for m in found.stages if m.name == "prepare"]
    source = found.params.get("prepare.source", "?")
    lines = [f"Source: `{source}`."]
    if found.given:
        rows = [[code(item.path), code(item.hash)] for item in found.given]
        lines += ["What was given:", _table(["path", "DVC hash"], rows)]
    if found.sources:
        heads = list(found.sources[0])
        rows = [[_cell(source.get(head)) for head in heads] for source in found.sources]
        lines += ["What became of the rows of each source:", _table(heads, rows)]
    if found.data:
        lines += [
            "What prepare counted:",
            _table(
                ["", "number"],
                [[plain(name), _number(value)] for name, value in found.data.items()],
            ),
        ]
    made = {path: d for m in prepared for path, d in m.outs.items() if path.startswith(DATA)}
    rows = [[code(path), code(digest)] for path, digest in sorted(made.items())]
    if rows:
        lines += ["What was trained on and measured with:", _table(["file", "DVC hash"], rows)]
    return "\n\n".join(lines)


def _params(found: Provenance) -> str:
    known = {**defaults(), **flatten(Params().model_dump(mode="json", by_alias=True))}
    other = {k: v for k, v in sorted(found.params.items()) if k not in known or known[k] != v}
    changed = [[code(key), code(value_text(value))] for key, value in other.items()]
    shown = (
        f"Those that are not at their defaults:\n\n{_table(['param', 'value'], changed)}"
        if changed
        else "All are at their defaults."
    )
    whole = "\n".join(f"{key}: {json.dumps(value)}" for key, value in sorted(found.params.items()))
    return (
        f"{shown}\n\n<details><summary>All params</summary>\n\n```yaml\n{whole}\n```\n\n</details>"
    )


def _hashes(found: Provenance, weights: Mapping[str, str], how: str) -> str:
    rows = [
        ["policy (DVC)", f"`{found.artifact.hash}`"],
        ["code (commit)", _commit(found)],
        ["params (sha256)", f"`{found.params_hash}`"],
        *([f"{code(name)} (sha256)", code(digest)] for name, digest in sorted(weights.items())),
    ]
    return f"{how}\n\n{_table(['of', 'hash'], rows)}"


def _commit(found: Provenance) -> str:
    job = found.making.job
    changed = ", ".join(map(code, job.uncommitted)) if job else ""
    more = f", with uncommitted changes to {changed}" if changed else ""
    return f"`{found.commit or 'not recorded'}`{more}"


def _lineage(found: Provenance) -> str:
    rows = [
        [
            f"`{making.stage}`",
            "<br>".join(f"`{path}` {digest}" for path, digest in sorted(making.outs.items())),
            f"`{(making.code_version or 'not recorded')[:12]}`",
        ]
        for making in found.stages
    ]
    table = _table(["stage", "outputs, with their hashes in dvc.lock", "code"], rows)
    return (
        "Stage after stage, the last one made this policy. `lineage.json` says more, and in the "
        f"clone `lockstep lineage HASH` tells of any of these hashes.\n\n{table}"
    )


def _cell(value: Any) -> str:
    """A count, a name, or counts by reason."""
    if isinstance(value, Mapping):
        parts = [f"{plain(name)}: {_cell(part)}" for name, part in sorted(value.items())]
        return ", ".join(parts) or "none"
    return _number(value) if isinstance(value, int | float) else plain(str(value or ""))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(in_cell, line))} |" for line in lines)
