"""Which container is the engine, which version it has, and what its options allow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpeer_operator.injection.command_line import CommandLine, Engine, command_engines, find_command_line
from kvpeer_operator.injection.names import CONTAINER_ANNOTATION, ENGINE_ANNOTATION, VERSION_ANNOTATION
from kvpeer_operator.injection.reasons import Skip, SkipReason

__all__ = ["SUPPORTED", "EngineContainer", "find_engine", "flags_of", "refusal"]

SUPPORTED = {Engine.VLLM: "0.32", Engine.SGLANG: "0.5.23"}
"""What the adapters were written for and run with: this version and those that only add a further number."""

_REPOSITORIES = {
    Engine.VLLM: re.compile(r"(^|/)vllm/vllm-openai(-cpu)?$"),
    Engine.SGLANG: re.compile(r"(^|/)lmsysorg/sglang$"),
}
"""Images whose tag is the engine's version; mirrors keep the last two parts of the name."""

_VERSION = re.compile(r"v?(\d+(?:\.\d+)+)(?:[-+.a-z].*)?")

_VLLM_TRANSFER = {
    "kv_connector": "KVPeerConnector",
    "kv_connector_module_path": "kvpeer.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_SGLANG_BACKEND = {
    "backend_name": "kvpeer",
    "module_path": "kvpeer.engines.sglang",
    "class_name": "KVPeerStorage",
    "interface_v1": 1,
}

_VLLM_CONFLICTS = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend")
_VLLM_SIZES = (
    ("--pipeline-parallel-size", "-pp"),
    ("--decode-context-parallel-size", "-dcp"),
    ("--prefill-context-parallel-size", "-pcp"),
    ("--nnodes", "-n"),
)
"""The connector refuses more than 1."""
_VLLM_REFUSED = (
    "--calculate-kv-scales",
    "--prefix-match-unit",
    "--no-enable-prefix-caching",
    "--no-disable-hybrid-kv-cache-manager",
)
_VLLM_HASHES = frozenset({"sha256", "sha256_cbor"})
_SGLANG_REFUSED = ("--disable-radix-cache", "--lora-paths")
_SGLANG_LAYOUTS = frozenset({"layer_first", "page_first", "page_first_direct", "page_head"})
_FILE = "--config"
"""Both engines read further options from a file, which cannot be seen here."""


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """`index` of the engine's container among the pod's."""

    index: int
    engine: Engine
    line: CommandLine


def find_engine(pod: Mapping[str, Any]) -> EngineContainer | Skip:
    """The engine's container: the one that is named by annotation, else whose command starts an engine, else whose
    image is one's."""
    containers = pod["spec"]["containers"]
    annotations = pod["metadata"].get("annotations") or {}
    named, kind = annotations.get(CONTAINER_ANNOTATION), annotations.get(ENGINE_ANNOTATION)
    if kind is not None and kind not in {engine.value for engine in Engine}:
        return Skip(SkipReason.UNKNOWN_ENGINE, f"the annotation {ENGINE_ANNOTATION} is {kind!r}: use vllm or sglang")
    candidates = [(i, each) for i, each in enumerate(containers) if named in (None, each["name"])]
    for engines_of in (command_engines, _image_engines):
        found = [(i, engine) for i, each in candidates for engine in engines_of(each) if kind in (None, engine)]
        if found:
            break
    else:
        # Told by annotations alone: the one container that they can mean.
        found = [(i, Engine(kind)) for i, _ in candidates] if kind else []
    if not found:
        fix = f"annotate it with {ENGINE_ANNOTATION}: vllm or sglang, and {CONTAINER_ANNOTATION} if it has several"
        return Skip(SkipReason.UNKNOWN_ENGINE, f"no container of the pod is known to run vLLM or SGLang: {fix}")
    if len(found) > 1:
        names = ", ".join(containers[i]["name"] for i, _ in found)
        fix = f"annotate the pod with {CONTAINER_ANNOTATION}: <name>"
        return Skip(SkipReason.SEVERAL_ENGINES, f"more than one container could be the engine ({names}): {fix}")
    ((index, engine),) = found
    line = find_command_line(containers[index], engine)
    if line is None:
        return Skip(
            SkipReason.COMMAND_OVERRIDE,
            f"flags cannot be added to the command of container {containers[index]['name']}: start the engine once, by "
            f"`{' '.join(_start_words(engine))} ...`, outside of quotes, and keep what PYTHONPATH holds",
        )
    return EngineContainer(index, engine, line)


def refusal(pod: Mapping[str, Any], found: EngineContainer) -> Skip | None:
    """Why this engine would not start with the adapter, or not be the user's any more; None: nothing speaks against
    it."""
    container = pod["spec"]["containers"][found.index]
    version = _version(pod, container, found.engine)
    if version is None:
        fix = f"annotate the pod with {VERSION_ANNOTATION}: <version>"
        return Skip(SkipReason.UNKNOWN_VERSION, f"the tag of {container.get('image')} is no version of it: {fix}")
    if not f"{version}.".startswith(f"{SUPPORTED[found.engine]}."):
        known = f"{found.engine.value} {SUPPORTED[found.engine]}"
        return Skip(SkipReason.UNSUPPORTED_VERSION, f"this is version {version}; the adapter is for {known}")
    if found.line.has(_FILE):
        return Skip(
            SkipReason.UNSUPPORTED_OPTION, f"{_FILE} names a file that may hold conflicting options: give them as flags"
        )
    return _vllm_refusal(found.line) if found.engine is Engine.VLLM else _sglang_refusal(found.line)


def flags_of(found: EngineContainer) -> list[str]:
    """The flags that connect the engine to its agent."""
    if found.engine is Engine.VLLM:
        flags = ["--kv-transfer-config", json.dumps(_VLLM_TRANSFER)]
        hybrid = "--disable-hybrid-kv-cache-manager"
        return flags if found.line.has(hybrid) else [*flags, hybrid]
    backend = json.dumps(_SGLANG_BACKEND)
    return ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", backend]


def _vllm_refusal(line: CommandLine) -> Skip | None:
    if line.has(*_VLLM_CONFLICTS):
        return Skip(
            SkipReason.CONFLICTING_KV_TRANSFER_CONFIG,
            f"the engine has a KV connector of its own: remove {', '.join(_VLLM_CONFLICTS)} to use kvpeer",
        )
    for flags in _VLLM_SIZES:
        if line.value(*flags) not in (None, "1"):
            return _unsupported(f"{flags[0]} is {line.value(*flags)!r}: kvpeer needs 1, all ranks on one node")
    for flag in _VLLM_REFUSED:
        if line.has(flag):
            return _unsupported(f"kvpeer cannot share pages with {flag}: remove it")
    algorithm = line.value("--prefix-caching-hash-algo")
    if algorithm is not None and algorithm not in _VLLM_HASHES:
        return _unsupported(f"--prefix-caching-hash-algo is {algorithm}: use sha256 or sha256_cbor")
    return None


def _sglang_refusal(line: CommandLine) -> Skip | None:
    if line.has("--hicache-storage-backend", "--hicache-storage-backend-extra-config"):
        return Skip(
            SkipReason.CONFLICTING_HICACHE_BACKEND,
            "the engine has a storage backend of its own: remove --hicache-storage-backend to use kvpeer",
        )
    if not line.has("--enable-hierarchical-cache"):
        return Skip(
            SkipReason.HIERARCHICAL_CACHE_OFF,
            "kvpeer is a backend of HiCache: add --enable-hierarchical-cache, and memory for its host pool",
        )
    for flag in _SGLANG_REFUSED:
        if line.has(flag):
            return _unsupported(f"kvpeer cannot share pages with {flag}: remove it")
    layout = line.value("--hicache-mem-layout")
    if layout is not None and layout not in _SGLANG_LAYOUTS:
        return _unsupported(f"--hicache-mem-layout is {layout}: use page_first")
    return None


def _unsupported(message: str) -> Skip:
    return Skip(SkipReason.UNSUPPORTED_OPTION, message)


def _start_words(engine: Engine) -> tuple[str, str]:
    return ("vllm", "serve") if engine is Engine.VLLM else ("sglang", "serve")


def _image_engines(container: Mapping[str, Any]) -> set[Engine]:
    repository = _split_image(container)[0]
    return {engine for engine, pattern in _REPOSITORIES.items() if pattern.search(repository)}


def _version(pod: Mapping[str, Any], container: Mapping[str, Any], engine: Engine) -> str | None:
    """The engine's version, numbers alone."""
    said = (pod["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION)
    if said is None and engine in _image_engines(container):
        said = _split_image(container)[1]
    match = _VERSION.fullmatch(said or "")
    return match[1] if match else None


def _split_image(container: Mapping[str, Any]) -> tuple[str, str]:
    """Repository and tag."""
    name = str(container.get("image", "")).partition("@")[0]
    repository, separator, tag = name.rpartition(":")
    return (repository, tag) if separator and "/" not in tag else (name, "")
