"""What the card of a policy says about the GGUF file that it began with."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from pipelines.export import card
from tests.models.gguf_files import convert, tiny_llama, write_gguf
from tests.models.test_exported import provenance


def exported_card(base: Path, folder: str = "models/model") -> ModelCard:
    """Of a policy that began with this base model."""
    given = ModelCard((base / "README.md").read_text(encoding="utf-8")).data.to_dict()
    params = {"model.source": "folder", "model.folder": folder}
    found = provenance(Path("nowhere"), base_card=given, params=params)
    return ModelCard(card.render(found, {}, "", adapter=False)).data


def test_a_card_is_written_from_what_a_file_says_about_itself(tmp_path):
    said = {
        "general.name": "Tiny: 1M *é*",
        "general.license": "other",
        "general.license.name": "tiny-1.0",
        "general.license.link": "https://example.org/no",
        "general.languages": ["en", "no"],
        "general.base_model.0.name": "Older",
        "general.base_model.0.repo_url": "https://huggingface.co/us/Older",
    }
    file = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama(), metadata=said)
    convert(file.parent, tmp_path / "base")
    exported = exported_card(tmp_path / "base")
    assert exported.base_model == "Tiny: 1M *é*"
    assert (exported.license, exported.license_name) == ("other", "tiny-1.0")
    assert exported.license_link == "https://example.org/no"
    assert exported.language == ["en", "no"]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"general.source.repo_url": "https://huggingface.co/us/Tiny-1M/"}, "us/Tiny-1M"),
        ({"general.source.repo_url": "https://example.org/us/Tiny-1M"}, "tiny"),
        (
            {
                "general.base_model.0.name": "Tiny",
                "general.base_model.0.repo_url": "https://huggingface.co/us/Tiny",
            },
            "us/Tiny",
        ),
        ({"general.name": None, "general.basename": "tiny", "general.size_label": "1M"}, "tiny-1M"),
        ({"general.name": None}, "file.Q8_0"),
    ],
)
def test_the_base_is_called_what_the_hub_or_the_file_calls_it(tmp_path, said, name):
    file = write_gguf(tmp_path / "given" / "file.Q8_0.gguf", tiny_llama(), metadata=said)
    convert(file, tmp_path / "base")
    exported = exported_card(tmp_path / "base")
    assert (exported.base_model, exported.license) == (name, None)


def test_the_card_and_the_licence_beside_a_file_are_taken(tmp_path):
    file = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama())
    text = "---\nlicense: mit\nbase_model_name: us/tiny\n---\n# Tiny\n"
    (file.parent / "README.md").write_text(text)
    (file.parent / "LICENSE.txt").write_text("Do as you like.")
    convert(file, tmp_path / "base")
    assert (tmp_path / "base" / "README.md").read_text() == text
    assert (tmp_path / "base" / "LICENSE.txt").read_text() == "Do as you like."
    exported = exported_card(tmp_path / "base")
    assert (exported.base_model, exported.license) == ("us/tiny", "mit")
