"""Weights identity: equal exactly for equal content, cheap to ask again, refused where it cannot be known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from kvpeer.engines import weights
from kvpeer.engines.weights import weights_identity
from kvpeer.model import ConfigError


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(a.tobytes() for a in tensors.values()))


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"layers.{n}.weight": rng.random((64, 40), np.float32) for n in range(3)}


def checkpoint(folder: Path, arrays: dict[str, np.ndarray], n_files: int = 1, config: str = '{"layers": 3}') -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    names = list(arrays)
    for n in range(n_files):
        write_safetensors(folder / f"model-{n}.safetensors", {name: arrays[name] for name in names[n::n_files]})
    return folder


def identity(folder: Path | None, cache_folder: Path | None = None, **changes: object) -> str:
    arguments: dict[str, object] = {
        "declared": "",
        "load_format": "auto",
        "seed": 0,
        "model": "m",
        "folder": folder,
        "cache_folder": cache_folder,
    }
    return weights_identity(**{**arguments, **changes})  # type: ignore[arg-type]


def test_the_path_and_the_sharding_of_a_checkpoint_do_not_matter(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", tensors())
    two = checkpoint(tmp_path / "elsewhere", tensors(), n_files=2)
    assert identity(one) == identity(two)


@pytest.mark.parametrize("change", ["value of one tensor", "name", "shape", "config"])
def test_another_content_is_another_identity(tmp_path: Path, change: str) -> None:
    arrays, config = tensors(), '{"layers": 3}'
    if change == "value of one tensor":
        arrays["layers.1.weight"] = arrays["layers.1.weight"] + 1
    elif change == "name":
        arrays["layers.9.weight"] = arrays.pop("layers.1.weight")
    elif change == "shape":
        arrays["layers.1.weight"] = arrays["layers.1.weight"].reshape(40, 64)
    else:
        config = '{"layers": 3, "rope_theta": 5}'
    assert identity(checkpoint(tmp_path / "a", tensors())) != identity(
        checkpoint(tmp_path / "b", arrays, config=config)
    )


def test_a_checkpoint_is_read_once_until_its_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache_folder = checkpoint(tmp_path / "a", tensors()), tmp_path / "cache"
    before = identity(folder, cache_folder)
    n_reads = []
    digest = weights.checkpoint_digest
    monkeypatch.setattr(weights, "checkpoint_digest", lambda *a: n_reads.append(1) or digest(*a))
    assert identity(folder, cache_folder) == before
    assert n_reads == []
    write_safetensors(folder / "model-0.safetensors", tensors(seed=1))
    assert identity(folder, cache_folder) != before
    assert n_reads == [1]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = checkpoint(tmp_path / "a", tensors())
    assert identity(folder, tmp_path / "file" / "cache") == identity(folder)


def test_what_the_operator_declares_wins(tmp_path: Path) -> None:
    assert identity(None, declared="org/model@abc", load_format="tensorizer") == "declared:org/model@abc"


def test_dummy_weights_are_named_by_their_seed() -> None:
    assert identity(None, load_format="dummy", seed=1) != identity(None, load_format="dummy", seed=2)


@pytest.mark.parametrize(
    "case", ["format", "no folder", "no safetensors", "not safetensors", "damaged header", "unreadable"]
)
def test_weights_that_cannot_be_told_apart_are_refused_with_the_setting_that_helps(tmp_path: Path, case: str) -> None:
    folder: Path | None = checkpoint(tmp_path / "a", tensors())
    assert folder is not None
    file, load_format = folder / "model-0.safetensors", "auto"
    if case == "format":
        load_format = "runai_streamer_sharded"
    elif case == "no folder":
        folder = None
    elif case == "no safetensors":
        file.rename(folder / "model.bin")
    elif case == "not safetensors":
        file.write_bytes(b"PK")
    elif case == "damaged header":
        file.write_bytes((20).to_bytes(8, "little") + b"{not json at all....")
    else:
        file.unlink()
        os.symlink(tmp_path / "nowhere", file)
    with pytest.raises(ConfigError, match="weights_identity"):
        identity(folder, load_format=load_format)
