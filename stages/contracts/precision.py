"""In which type of number models compute. No torch."""

from enum import StrEnum


class Precision(StrEnum):
    """Of weights and activations; log-probs, losses and what learns are float32 in either."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """The model that computes is a copy, rounded from float32 weights that learn and are saved."""
