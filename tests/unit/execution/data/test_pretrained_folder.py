"""Folders of pretrained models: nothing outside of the folder of folders is reached, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.pretrained_folder import MODEL_PATH_VARIABLE, PretrainedFolder
from pg_tensile.rules import check_architecture
from tests.examples import examples
from tests.pretrained import minilm, save_bert


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("saved") / "bert")


@pytest.fixture
def root(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of folders with `bert`, beside `outside`, which has the same and must not be reached."""
    shutil.copytree(bert, tmp_path / "outside" / "bert")
    shutil.copytree(bert, tmp_path / "models" / "bert")
    monkeypatch.setenv(MODEL_PATH_VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


def refusal(name: str = "bert") -> str:
    with pytest.raises(ArchitectureError) as caught:
        PretrainedFolder.open(name)
    assert caught.value.hint
    return str(caught.value)


def test_a_folder_below_the_setting_is_opened(root: Path) -> None:
    assert PretrainedFolder.open("bert").path == root / "bert"
    shutil.copytree(root / "bert", root / "org" / "bert-2.0_x")
    assert PretrainedFolder.open("org/bert-2.0_x").weight_bytes > 0
    (root / "same").symlink_to("org/bert-2.0_x")
    assert PretrainedFolder.open("same").sha256 == PretrainedFolder.open("bert").sha256


PARTS = st.sampled_from(
    ["..", ".", "", "bert", "outside", "models", "~", "%2e%2e", "bert\0", "\n", "..\\", "*", "$HOME"]
)
HOSTILE = st.lists(PARTS, min_size=1, max_size=6).map("/".join) | st.text(max_size=40)


@examples(100, suppress=[HealthCheck.function_scoped_fixture])
@given(HOSTILE)
def test_no_name_leads_outside(root: Path, name: str) -> None:
    try:
        path = PretrainedFolder.open(name).path
    except ArchitectureError as error:
        assert error.message == f'there is no folder "{name}" in pg_tensile.model_path'
        return
    assert path == root / "bert"
    check_architecture({"type": "pretrained", "path": name})


@pytest.mark.parametrize("name", ["../outside/bert", "/etc", "bert/../../outside/bert", "bert/", ".", "", "a" * 300])
def test_hostile_names_are_refused_by_the_rules_too(root: Path, name: str) -> None:
    with pytest.raises(ArchitectureError, match='"path"'):
        check_architecture({"type": "pretrained", "path": name})
    assert refusal(name) == f'there is no folder "{name}" in pg_tensile.model_path'


def test_symbolic_links_lead_nowhere_else(root: Path) -> None:
    """The message is that of a folder that does not exist."""
    (root / "link").symlink_to(root.parent / "outside" / "bert")
    (root / "up").symlink_to("..")
    (root / "loop").symlink_to("loop")
    (root / "root").symlink_to(root)
    for name in ("link", "up/outside/bert", "loop", "root", "absent"):
        assert refusal(name) == f'there is no folder "{name}" in pg_tensile.model_path'


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_files_that_lead_outside_are_refused(root: Path, name: str) -> None:
    (root / "bert" / name).unlink()
    (root / "bert" / name).symlink_to(root.parent / "outside" / "bert" / name)
    assert f"has no file {name}" in refusal()


def test_links_within_the_folder_of_folders_are_followed(root: Path) -> None:
    """As in a cache of the Hub: snapshots of links to blobs."""
    (root / "blobs").mkdir()
    for path in list((root / "bert").iterdir()):
        path.rename(root / "blobs" / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    assert PretrainedFolder.open("bert").weight_bytes > 0


@pytest.mark.parametrize("value", ["", "relative", "/nonexistent", "/etc/passwd"])
def test_a_setting_that_is_no_folder_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(MODEL_PATH_VARIABLE, value)
    assert "pg_tensile.model_path is not" in refusal()


def test_pickled_weights_are_never_read(root: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(root / "executed"),)

    (root / "bert" / "model.safetensors").unlink()
    (root / "bert" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "no model.safetensors" in refusal()
    assert not (root / "executed").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {"auto_map": {"AutoModel": "code.Model"}}, "the model in the folder .* needs code"),
        ("tokenizer_config.json", {"auto_map": {}}, "the tokenizer in the folder .* needs code"),
        ("config.json", {"model_type": None}, "does not say of which type"),
        ("config.json", {"is_encoder_decoder": True}, "an encoder with a decoder"),
        ("adapter_config.json", {}, "an adapter instead of a whole model"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../outside/x.safetensors"}}, "lacks files"),
        ("model.safetensors.index.json", {"weight_map": []}, "lacks files"),
    ],
)
def test_what_cannot_be_used_is_refused(root: Path, name: str, content: dict[str, object], message: str) -> None:
    path = root / "bert" / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    with pytest.raises(ArchitectureError, match=message):
        PretrainedFolder.open("bert")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", "[" * 100_000, '{"a": \ud800'.encode(errors="replace").decode()]
)
def test_damaged_json_is_refused(root: Path, content: str) -> None:
    (root / "bert" / "config.json").write_text(content)
    assert "config.json of the folder" in refusal()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(root: Path, name: str) -> None:
    (root / "bert" / name).unlink()
    assert f"has no {name}" in refusal()


def test_pooling_and_normalisation_are_those_of_sentence_transformers(root: Path) -> None:
    assert PretrainedFolder.open("bert").pooling is None and PretrainedFolder.open("bert").normalises
    shutil.copytree(minilm(), root / "minilm")
    assert PretrainedFolder.open("minilm").pooling == "mean" and PretrainedFolder.open("minilm").normalises
    (root / "minilm" / "modules.json").write_text("[]")
    assert not PretrainedFolder.open("minilm").normalises
    (root / "minilm" / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ArchitectureError, match="pooling that is not supported"):
        _ = PretrainedFolder.open("minilm").pooling
