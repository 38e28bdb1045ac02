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
This model is the result of a training run, not a product. It was evaluated only on the held-out
prompts of its own data: its behaviour on other prompts is not known. It may be confidently wrong.
The reward it was optimised for is only a proxy for quality; read samples, not only the metrics,
before you rely on it. Biases of the base model and of the data are likely to remain. The pipeline
includes no safety evaluation.

Intended use: research, and as a starting point for further training. Other use depends on the
licences of the base model and of the data."""


def render(provenance: Provenance, weights: Mapping[str, str], how: str, *, adapter: bool) -> str:
    """The card. `weights`: sha256 of each file of weights. `how`: a sentence on their format."""
    parts = [
        _front_matter(provenance, adapter=adapter),
        f"# {provenance.policy}",
        _summary(provenance),
        "## How to load it",
        _snippet(provenance, adapter=adapter),
        "## Metrics",
        _metrics(provenance),
        "## Data",
        _data(provenance),
        "## Params",
        _params(provenance),
        "## Hashes",
        _hashes(provenance, weights, how),
        "## Lineage",
        _lineage(provenance),
        "## Intended use and limits",
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def lineage_json(provenance: Provenance) -> dict[str, Any]:
    """The same as JSON: each stage with its params, inputs and outputs."""
    return {
        "policy": provenance.policy,
        "path": provenance.artifact.path,
        "hash": provenance.artifact.hash,
        "commit": provenance.commit,
        "params_hash": provenance.params_hash,
        "given": [{"path": item.path, "hash": item.hash} for item in provenance.given],
        "stages": [
            {
                "stage": stage_run.stage,
                "commit": stage_run.commit,
                "code": stage_run.code_version,
                "params": dict(sorted(stage_run.params.items())),
                "inputs": dict(sorted(stage_run.inputs.items())),
                "outs": dict(sorted(stage_run.outs.items())),
            }
            for stage_run in provenance.stages
        ],
        "evaluation": dict(provenance.evaluation),
        "evaluation_of_sft": dict(provenance.of_sft),
        "data": dict(provenance.data),
        "sources": [dict(source) for source in provenance.sources],
    }


def _front_matter(provenance: Provenance, *, adapter: bool) -> str:
    algorithm = provenance.params.get("rl.algorithm")
    values: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(filter(None, ["lockstep", "rlhf", algorithm])),
    }
    if base := _base_model(provenance):
        values["base_model"] = base
    for key in ("license", "license_name", "license_link", "language"):
        if key in provenance.base_card:
            values[key] = provenance.base_card[key]
    if datasets := _datasets(provenance):
        values["datasets"] = datasets
    if provenance.evaluation:
        dataset = {"name": "held-out prompts", "type": "lockstep-held-out"}
        outs = [out for stage_run in provenance.stages for out in stage_run.outs.items()]
        held_out = [digest for path, digest in outs if path.endswith("held_out.parquet")]
        if held_out:
            dataset["revision"] = held_out[0]
        values["model-index"] = [
            {
                "name": provenance.policy,
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": dataset,
                        "metrics": [
                            {"type": name, "name": name, "value": value}
                            for name, value in provenance.evaluation.items()
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
    # To the hub's older YAML 1e-05 is a text, and 1.0e-05 a number.
    spelt = _SHORT_NUMBER.sub(r"\1.0\2", text.getvalue())
    return f"---\n{spelt}---"


def _quoted(value: Any) -> Any:
    """With every text in quotes: in the hub's older YAML a bare `no` is false."""
    if isinstance(value, Mapping):
        return {str(key): _quoted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_quoted(part) for part in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) else value


def _base_model(provenance: Provenance) -> str | None:
    if provenance.params.get("model.source") != "folder":
        return None
    named = (
        provenance.base_card.get("base_model_name")
        or PurePosixPath(str(provenance.params.get("model.folder"))).name
    )
    return str(named)


def _datasets(provenance: Provenance) -> list[str]:
    """The hub's datasets that were trained on; local folders are not on the hub."""
    ids: set[str] = set()
    if provenance.params.get("prepare.source") == "files":
        for name, value in provenance.params.items():
            if not name.startswith("prepare.files.") or name.startswith("prepare.files.held_out"):
                continue
            sources = value if isinstance(value, list) else []
            ids.update(s["dataset"] for s in sources if isinstance(s, Mapping) and "dataset" in s)
            if name.endswith(".dataset"):  # one source needs no list around it
                ids.add(str(value))
    return sorted(ids)


def _summary(provenance: Provenance) -> str:
    algorithm = provenance.params.get("rl.algorithm", "?")
    how = {"sft": "supervised fine-tuning", "preference": "learning from preferences"}.get(
        provenance.stage_run.name, f"reinforcement learning ({algorithm})"
    )
    start = _base_model(provenance)
    of = code(start) if start else "a small model built from the params"
    made = f"trained from {of} by {how}"
    if provenance.stage_run.name == "sft" and provenance.params.get("sft.epochs") == 0:
        made = f"which is {of} as it was given (sft.epochs is 0)"
    return (
        f"The policy `{provenance.policy}`, {made}. Everything below was written by Lockstep from "
        "the records of the run."
    )


def _snippet(provenance: Provenance, *, adapter: bool) -> str:
    own_code = any(name.endswith("allowed_code.json") for name in provenance.files)
    options = ", trust_remote_code=True" if own_code else ""
    tokens = provenance.params.get("rollout.max_new_tokens", 64)
    return _LOADED.format(
        imports=_ADAPTER_IMPORTS if adapter else _IMPORTS,
        loading=(_ADAPTER_LOADING if adapter else _LOADING).format(options=options),
        tokens=tokens,
    )


def _metrics(provenance: Provenance) -> str:
    if not provenance.evaluation:
        return "This policy was not evaluated."
    names = dict.fromkeys([*provenance.evaluation, *provenance.of_sft])
    is_sft = provenance.evaluation == provenance.of_sft
    heads = ["metric", provenance.policy] + ([] if is_sft else ["sft"])
    rows = [
        [plain(name), _number(provenance.evaluation.get(name))]
        + ([] if is_sft else [_number(provenance.of_sft.get(name))])
        for name in names
    ]
    return f"On the held-out prompts, which no training step has seen.\n\n{_table(heads, rows)}"


def _data(provenance: Provenance) -> str:
    prepared = [m for m in provenance.stages if m.name == "prepare"]
    source = provenance.params.get("prepare.source", "?")
    lines = [f"Source: `{source}`."]
    if provenance.given:
        rows = [[code(item.path), code(item.hash)] for item in provenance.given]
        lines += ["Given inputs:", _table(["path", "DVC hash"], rows)]
    if provenance.sources:
        heads = list(provenance.sources[0])
        rows = [[_cell(source.get(head)) for head in heads] for source in provenance.sources]
        lines += ["Rows of each source:", _table(heads, rows)]
    if provenance.data:
        rows = [[plain(name), _number(value)] for name, value in provenance.data.items()]
        lines += ["Counts from prepare:", _table(["", "number"], rows)]
    made = {path: d for m in prepared for path, d in m.outs.items() if path.startswith(DATA)}
    if made:
        rows = [[code(path), code(digest)] for path, digest in sorted(made.items())]
        lines += ["Training and evaluation files:", _table(["file", "DVC hash"], rows)]
    return "\n\n".join(lines)


def _params(provenance: Provenance) -> str:
    params, known = sorted(provenance.params.items()), defaults()
    changed = [
        [code(key), code(value_text(value))]
        for key, value in params
        if key not in known or known[key] != value
    ]
    shown = (
        f"Params that differ from their defaults:\n\n{_table(['param', 'value'], changed)}"
        if changed
        else "All params are at their defaults."
    )
    whole = "\n".join(f"{key}: {json.dumps(value)}" for key, value in params)
    return (
        f"{shown}\n\n<details><summary>All params</summary>\n\n```yaml\n{whole}\n```\n\n</details>"
    )


def _hashes(provenance: Provenance, weights: Mapping[str, str], how: str) -> str:
    rows = [
        ["policy (DVC)", f"`{provenance.artifact.hash}`"],
        ["code (commit)", _commit(provenance)],
        ["params (sha256)", f"`{provenance.params_hash}`"],
        *([f"{code(name)} (sha256)", code(digest)] for name, digest in sorted(weights.items())),
    ]
    return f"{how}\n\n{_table(['of', 'hash'], rows)}"


def _commit(provenance: Provenance) -> str:
    job = provenance.stage_run.job
    changed = ", ".join(map(code, job.uncommitted)) if job else ""
    more = f", with uncommitted changes to {changed}" if changed else ""
    return f"`{provenance.commit or 'not recorded'}`{more}"


def _lineage(provenance: Provenance) -> str:
    rows = [
        [
            f"`{stage_run.stage}`",
            "<br>".join(f"`{path}` {digest}" for path, digest in sorted(stage_run.outs.items())),
            f"`{(stage_run.code_version or 'not recorded')[:12]}`",
        ]
        for stage_run in provenance.stages
    ]
    table = _table(["stage", "outputs, with their hashes in dvc.lock", "code"], rows)
    return (
        "All stages in order; the last one produced this policy. `lineage.json` has more details, "
        f"and in the clone `lockstep lineage HASH` looks up any of these hashes.\n\n{table}"
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
