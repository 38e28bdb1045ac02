"""The address that is written down and shown has no credentials in it."""

import pytest
from fake_clone import FakeClone

from pipelines.tracking.cursor import store_address


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("https://me:secret@mlflow.example/base", "https://mlflow.example/base"),
        ("postgresql://me:secret@db:5432/mlflow?password=x", "postgresql://db:5432/mlflow"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("databricks", "databricks"),
    ],
)
def test_credentials_are_left_out(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch, uri: str, address: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert store_address(clone.repository) == address
