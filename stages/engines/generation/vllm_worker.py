"""Inside vLLM's workers: what they hold is, bit by bit, what a model folder's files hold.

vLLM renames nothing that is compared here, but it fuses projections (q, k and v; gate and up), cuts
matrices over the GPUs of a tensor-parallel group and pads vocabularies; on a CPU it keeps matrices
in a packed form. So each tensor in memory is compared with what it has to be: the file's tensors,
read one at a time, cut for this worker, put together and cast. A tensor whose form is not known
here is an error, never passed over.

And what they do is over when the stage is: an engine in a process of its own must not outlive it.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.context import StageError
from stages.engines.models.tensor_files import StoredTensor, stored_tensors
from stages.engines.models.weights import STEM, compare_tensor, is_computed

QKV, ROWS, COLUMNS, VOCABULARY = (
    {"QKVParallelLinear"},
    {"ColumnParallelLinear", "MergedColumnParallelLinear"},
    {"RowParallelLinear"},
    {"VocabParallelEmbedding", "ParallelLMHead"},
)
"""How a layer is cut over the workers, by the names of vLLM's classes."""
FUSED = {"QKVParallelLinear", "MergedColumnParallelLinear"}
WHOLE = {"ReplicatedLinear", "RMSNorm", "GemmaRMSNorm", "LayerNorm"}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Checked:
    """Added by vLLM to its worker class (`worker_extension_cls`), and called by name."""

    def end_with(self, stage: int) -> None:
        """End the engine when the stage's process is gone, however that ended.

        This may be the engine's process, or a worker that it has started.
        """
        gone, parent = os.pidfd_open(stage), os.getppid()

        def watch() -> None:
            select.select([gone], [], [])
            if parent != stage:
                with suppress(ProcessLookupError):
                    os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="end-with-stage", daemon=True).start()

    def differs_from_files(self, folder: str) -> str:
        """What is wrong with the weights of this worker; empty if nothing is."""
        try:
            stored = stored_tensors(Path(folder), STEM)
            _compare(self.model_runner.get_model(), stored, Path(folder))  # type: ignore[attr-defined]
        except StageError as error:
            return str(error)
        return ""


def _compare(model: Any, stored: dict[str, StoredTensor], folder: Path) -> None:
    left = set(stored)
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        names = [f"{source}.{kind}" for source in _sources(model, module_name)]
        for absent in set(names) - set(stored):
            raise StageError(
                f"{folder} has no tensor {absent}, so {name} of vLLM cannot be checked: save the "
                "whole model again, or set rollout.engine: torch"
            )
        left -= set(names)
        parts = [stored[source].whole() for source in names]
        if len(parts) == 1 and type(module).__name__ in FUSED and module.tp_size > 1:
            raise StageError(
                f"{folder} stores {names[0]} fused, and how vLLM cuts it over GPUs cannot be "
                "checked: set tensor_parallel: 1, or rollout.engine: torch"
            )
        expected = torch.cat([_cut(part, module, i, kind) for i, part in enumerate(parts)])
        held = parameter.data
        if held.numel() == 0:
            # A product may have lost the sign of a zero.
            held, expected = _unpacked(module, expected.shape[-1]) + 0.0, expected + 0.0
        if type(module).__name__ in VOCABULARY:
            held = held[: len(expected)]  # the rest is padding
        compare_tensor(folder, name, held, expected)
    if HEAD in left and getattr(model.config, "tie_word_embeddings", False):
        left.remove(HEAD)
        _compare_tied(folder, stored)
    left = {name for name in left if not is_computed(model, name)}
    if left:
        raise StageError(
            f"{folder} has a tensor {min(left)} that vLLM has no place for ({len(left)} such): "
            "config.json describes another model than the weights are of"
        )


def _sources(model: Any, module_name: str) -> list[str]:
    """The layers in the files that a layer of vLLM is made of."""
    parent, _, leaf = module_name.rpartition(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    return [f"{parent}.{source}" if parent else source for source in fused]


def _cut(tensor: Tensor, module: Any, index: int, kind: str) -> Tensor:
    """This worker's share of a file's tensor, the `index`-th that the layer is made of."""
    layer = type(module).__name__
    if layer in VOCABULARY:
        shard = module.shard_indices
        rows = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
        return tensor[rows]
    if layer in WHOLE or (layer in COLUMNS and kind == "bias"):
        return tensor
    # Several workers have the same keys and values where there are fewer of them than workers.
    shared: int = module.num_kv_head_replicas if layer in QKV and index else 1
    if layer not in QKV | ROWS | COLUMNS:
        raise StageError(
            f"vLLM holds a {layer}, which cannot be compared with the files: set "
            "rollout.engine: torch"
        )
    cuts = tensor.chunk(module.tp_size // shared, dim=1 if layer in COLUMNS else 0)
    share: Tensor = cuts[module.tp_rank // shared]
    return share


def _unpacked(module: Any, width: int) -> Tensor:
    """A matrix that only a packed form is left of: its product with the identity.

    Each number comes out as itself plus zeros.
    """
    rows = torch.eye(width, dtype=module.weight.dtype)
    return torch.as_tensor(module.cpu_linear(rows, module.weight, None)).T.contiguous()


def _compare_tied(folder: Path, stored: dict[str, Any]) -> None:
    embedding = next(name for name in stored if name.endswith(EMBEDDING))
    head = stored[HEAD].whole()
    if not torch.equal(head, stored[embedding].whole()):
        raise StageError(
            f"{folder}: {HEAD} and {embedding} differ, but config.json ties them: vLLM would "
            "answer with the embedding for both"
        )
