"""Which weights an engine runs, by content and not by path.

Two engines may share pages only when their weights are equal. The identity is, in this order: what the operator
declared; the seed of dummy weights; else a digest of config.json and of samples of every tensor of the checkpoint.
Samples tell fine-tunes, quantisations and revisions apart at the cost of a few reads a tensor; an edit of single
values can slip between them, so whoever edits a checkpoint in place declares `weights_identity`. Anything else that
cannot be sampled is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvpeer.model import ConfigError

__all__ = ["checkpoint_digest", "checkpoint_folder", "digest_cache_folder", "weights_identity"]

SAMPLE_BYTES = 256
SAMPLES_PER_TENSOR = 4
"""First, last and two in between: 1 KiB a tensor, about 1 MiB read for a model of 1,000 tensors."""

HEADER_BYTES_MAX = 100 * 1024 * 1024
"""The limit of the safetensors format itself."""

_SAMPLED_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "mistral", "instanttensor"})
_FIX = (
    "set weights_identity in kvpeer's extra config (vLLM: kv_connector_extra_config; SGLang: "
    "--hicache-storage-backend-extra-config) to a string that names these weights "
    "(for instance the repository and commit), equal on every engine that runs them"
)


def weights_identity(
    *, declared: str, load_format: str, seed: int, model: str, folder: Path | None, cache_folder: Path | None
) -> str:
    """Returns a string that is equal for engines that run equal weights. Reads the checkpoint at most once per change
    of its files.

    folder: where the checkpoint's files are on this machine, None if unknown. cache_folder: where digests are
    remembered, None to remember nothing.

    Raises:
        ConfigError: the weights cannot be told from others; the message names the setting that declares them.
    """
    if declared:
        return f"declared:{declared}"
    if load_format == "dummy":
        return f"dummy:{seed}"
    if load_format not in _SAMPLED_FORMATS:
        raise ConfigError(f"kvpeer cannot tell weights loaded with load_format={load_format!r} from others: {_FIX}")
    if folder is None or not folder.is_dir():
        raise ConfigError(f"kvpeer found no local checkpoint folder for model {model!r}: {_FIX}")
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json with *.safetensors files beside it: {_FIX}")
    try:
        return f"sampled:{_remembered_digest(folder, files, cache_folder)}"
    except OSError as error:
        raise ConfigError(f"kvpeer could not read the checkpoint in {folder} ({error}): {_FIX}") from error


def checkpoint_folder(model: str, revision: str | None, download_folder: str | None) -> Path | None:
    """Returns where an engine has loaded a model's weights from: a folder, or a snapshot in the Hugging Face cache;
    None where it is neither."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    config_file = try_to_load_from_cache(model, "config.json", cache_dir=download_folder, revision=revision)
    return Path(config_file).parent if isinstance(config_file, str) else None


def digest_cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Returns the user's folder for remembered digests; None for a process without a home."""
    home = environment.get("XDG_CACHE_HOME") or (str(Path("~/.cache").expanduser()) if environment.get("HOME") else "")
    return Path(home) / "kvpeer" if home else None


def checkpoint_digest(folder: Path, files: Iterable[Path]) -> str:
    """Returns the hex digest of config.json and of samples of every tensor in the safetensors files. Blocking.

    Raises:
        ConfigError: a file is not in the safetensors format.
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(b"kvpeer weights 1\n")
    digest.update(hashlib.sha256((folder / "config.json").read_bytes()).digest())
    tensors: list[tuple[str, bytes]] = []
    for file in files:
        tensors.extend(_tensor_samples(file))
    # By name and not by file: resharding a checkpoint does not change its weights.
    for name, sample in sorted(tensors):
        digest.update(struct.pack("<QQ", len(name), len(sample)) + name.encode() + sample)
    return digest.hexdigest()


def _tensor_samples(file: Path) -> list[tuple[str, bytes]]:
    samples = []
    with file.open("rb", buffering=0) as stream:
        header, start = _read_header(file, stream.fileno())
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            first, stop = tensor["data_offsets"]
            sample = hashlib.sha256(f"{tensor['dtype']}{tensor['shape']}".encode())
            for offset in _sample_offsets(first, stop):
                size = min(SAMPLE_BYTES, stop - offset)
                sample.update(os.pread(stream.fileno(), size, start + offset))
            samples.append((name, sample.digest()))
    return samples


def _read_header(file: Path, fd: int) -> tuple[dict[str, Any], int]:
    length_bytes = os.pread(fd, 8, 0)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) != 8 or not 2 <= length <= HEADER_BYTES_MAX:
        raise ConfigError(f"{file} is not a safetensors file: {_FIX}")
    try:
        header = json.loads(os.pread(fd, length, 8))
    except ValueError as error:
        raise ConfigError(f"{file} has a damaged safetensors header: {_FIX}") from error
    return header, 8 + length


def _sample_offsets(first: int, stop: int) -> list[int]:
    span = max(0, stop - first - SAMPLE_BYTES)
    return sorted({first + span * i // (SAMPLES_PER_TENSOR - 1) for i in range(SAMPLES_PER_TENSOR)})


def _remembered_digest(folder: Path, files: list[Path], cache_folder: Path | None) -> str:
    stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in [*files, folder / "config.json"]]
    state = hashlib.sha256(json.dumps([str(folder.resolve()), stats]).encode()).hexdigest()
    remembered = cache_folder / f"weights-{state}" if cache_folder is not None else None
    if remembered is not None and remembered.is_file():
        text = remembered.read_text().strip()
        if len(text) == hashlib.sha256().digest_size * 2:
            return text
    digest = checkpoint_digest(folder, files)
    if remembered is not None:
        # Not being able to remember costs the next start a few seconds, nothing else.
        with suppress(OSError):
            _write_atomically(remembered, digest)
    return digest


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
        stream.write(text)
    Path(stream.name).replace(path)
