"""How much memory the GPUs have that a site calls a100, nvidia_h100_80gb_hbm3 or rtx_6000_ada.

A name that says its size is believed, above all that of a MIG slice. Where GPUs of one name have
been sold with several sizes, the size is not known: what is too small would refuse stages that fit,
what is too large would let them fail.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

SIZES: dict[str, tuple[int, ...]] = {
    "b200": (178,),
    "gb200": (184,),
    "gh200": (94, 139),
    "h200": (139,),
    "h100": (79, 93),
    "h20": (94, 139),
    "a100": (39, 79),
    "a30": (23,),
    "a40": (44,),
    "a10": (22,),
    "a10g": (22,),
    "a16": (15,),
    "l40s": (44,),
    "l40": (44,),
    "l4": (22,),
    "v100": (15, 31),
    "p100": (11, 15),
    "t4": (14,),
    "rtxa6000": (47,),
    "rtxa5000": (23,),
    "a6000": (47,),
    "a5000": (23,),
    "rtx6000ada": (47,),
    "rtxpro6000": (94,),
    "rtx6000": (23,),
    "rtx5090": (31,),
    "rtx4090": (23,),
    "rtx3090": (23,),
    "rtx2080ti": (10,),
    "mi100": (31,),
    "mi210": (63,),
    "mi250x": (63,),
    "mi250": (63,),
    "mi300a": (127,),
    "mi300x": (191,),
    "mi325x": (255,),
}
"""GiB that a process can have, rounded down: less than the name of the product says."""


@dataclass(frozen=True)
class GpuMemory:
    """Of one GPU. Not known where `gib` is None; then `sizes` are those it may have, if any."""

    gib: int | None
    sizes: tuple[int, ...] = ()


def memory_of(kind: str, features: Iterable[str] = ()) -> GpuMemory:
    """By the GPU's name; a feature of the node (`a100_80g`) decides between several sizes."""
    if (said := _size_in(kind)) is not None:
        return GpuMemory(said)
    sizes = SIZES.get(model_in(kind) or "", ())
    if len(sizes) == 1:
        return GpuMemory(sizes[0], sizes)
    said_by_features = {size for feature in features if (size := _gpu_size(feature)) is not None}
    fitting = {size for said in said_by_features for size in sizes if 0 <= said - size <= said / 16}
    return GpuMemory(fitting.pop() if len(fitting) == 1 else None, sizes)


def model_in(text: str) -> str | None:
    """The model that a GRES type or a feature of a node speaks of: `h100` in `gpu_h100_sxm`."""
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]
    # `rtx_a6000` and `rtx-3090` are one name each, and longer names say more.
    runs = [
        "".join(words[first:end])
        for first in range(len(words))
        for end in range(len(words), first, -1)
    ]
    return next((run for run in sorted(runs, key=len, reverse=True) if run in SIZES), None)


def _size_in(text: str) -> int | None:
    """The gigabytes in `a100-sxm4-80gb`; of a slice as `1g.10gb` these are its own."""
    match = re.search(r"(?<!\d)(\d+)gb(?![a-z0-9])", text.lower())
    return _usable(int(match[1])) if match else None


def _gpu_size(feature: str) -> int | None:
    """A feature may speak of anything; one with a GPU's name, or `gpu` or `vram`, speaks of it."""
    match = re.search(r"(?<![\d])(\d+)gb?(?![a-z0-9])", feature.lower())
    speaks = model_in(feature) or re.search(r"gpu|vram", feature.lower())
    return int(match[1]) if match and speaks else None


def _usable(gigabytes: int) -> int:
    """What the driver leaves of it."""
    return gigabytes - max(1, gigabytes // 64)
