"""The class that a scalar model is loaded as: any causal language model can be under a head.

transformers has sequence classifiers of most families, and a folder's own code may have one; that
class is used, as it is. Of the others (Granite and Cohere are among them) one is made as
transformers makes its own: the backbone of the language model, and `score`, one linear layer
without a bias, which reads the last token. Its folder is an ordinary one, in which config.json
names the class that transformers lacks; AutoModel loads the backbone from it.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from stages.engines.models.lean_transformers import (
    CLASSIFIERS,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

OWN = "AutoModelForSequenceClassification"
"""What a config's `auto_map` calls a sequence classifier in the folder's own code."""


class AutoScalarModel:
    """As AutoModelForSequenceClassification, for every causal language model."""

    @staticmethod
    def from_pretrained(folder: Path, *, trust_remote_code: bool, **options: Any) -> Any:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        chosen = AutoModelForSequenceClassification
        if not _is_known(config):
            chosen = _under_a_head(*_language_model(config, trust_remote_code))
        return chosen.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)

    @staticmethod
    def from_config(config: Any, *, trust_remote_code: bool, **options: Any) -> Any:
        if _is_known(config):
            return AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=trust_remote_code, **options
            )
        return _under_a_head(*_language_model(config, trust_remote_code))._from_config(
            config, **options
        )


def _is_known(config: Any) -> bool:
    """Whether there is a classifier of the family."""
    return type(config) in CLASSIFIERS or OWN in (getattr(config, "auto_map", None) or {})


def classifier_name(language_model: str) -> str:
    """What the classifier is called that is made of a language model of this class."""
    return f"{language_model.removesuffix('ForCausalLM')}ForSequenceClassification"


def _language_model(config: Any, trusted: bool) -> tuple[Any, Any]:
    """The classes of a language model and of its backbone, which may be the folder's own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    return type(model), type(model.base_model)


@cache
def _under_a_head(whole: Any, backbone: Any) -> Any:
    from transformers.modeling_layers import GenericForSequenceClassification

    # What both descend from knows how the family's models are made and loaded, and has no head.
    family: Any = next(each for each in whole.__mro__ if issubclass(backbone, each))

    class Scalar(GenericForSequenceClassification, family):  # type: ignore[misc]
        base_model_prefix = whole.base_model_prefix
        config_class = whole.config_class

        def __init__(self, config: Any) -> None:
            family.__init__(self, config)
            self.num_labels = config.num_labels
            setattr(self, self.base_model_prefix, backbone(config))
            width = config.get_text_config().hidden_size
            self.score = torch.nn.Linear(width, self.num_labels, bias=False)
            self.post_init()

    Scalar.__name__ = classifier_name(whole.__name__)
    return Scalar
