"""Images: built by buildah without a daemon, put on the nodes as archives. No registry takes part.

Where a base image cannot be pulled, one is made from Debian's packages (`make_base`).

    python -m cluster.images CONTEXT BASE     builds the project's images (`make images`)
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

from cluster.binaries import binary
from cluster.folders import REPOSITORY, cache_folder
from cluster.nodes import PAUSE_IMAGE, import_image

__all__ = ["BASE_IMAGE", "PROJECT_IMAGES", "archive", "build_image", "has_image", "load", "make_base", "pause_archive"]

PROJECT_IMAGES = {"operator": "localhost/kvpeer/operator:0.1.0", "agent": "localhost/kvpeer/agent:0.1.0"}
"""What stands in images/, and what it is called on the nodes."""

BASE_IMAGE = "localhost/python:3.11"
_DEBIAN = "bookworm"  # its Python is 3.11
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates,libgomp1,libnuma1"
_AUTHORITIES = "/etc/ssl/certs"
"""Of this machine, for builds that download: behind a proxy it may trust other ones than the image."""


def make_base() -> None:
    """Makes `BASE_IMAGE` of Debian's packages, once. Minutes; needs root and debootstrap."""
    if has_image(BASE_IMAGE):
        return
    folder = _folder() / "base"
    _command("rm", "-rf", "--one-file-system", str(folder))
    _command("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _DEBIAN, str(folder))
    for left in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        _command("rm", "-rf", "--one-file-system", str(folder / left))
    container = _buildah("from", "scratch").strip()
    _buildah("copy", "-q", container, str(folder), "/")
    _buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    _buildah("commit", "-q", container, BASE_IMAGE)
    _buildah("rm", container)


def build_image(name: str, file: Path, context: Path, base: str) -> None:
    """Builds an image of a Dockerfile whose argument BASE names its base. Raises CalledProcessError."""
    pull = ["--pull-never"] if base.startswith("localhost/") else []
    authorities = ["--volume", f"{_AUTHORITIES}:{_AUTHORITIES}:ro"]
    _buildah(
        "bud", "-q", "--isolation", "chroot", "--layers", *pull, *authorities, "--build-arg", f"BASE={base}",
        "-t", name, "-f", str(file), str(context),
    )  # fmt: skip


def has_image(name: str) -> bool:
    """Whether it was built here."""
    return bool(_buildah("images", "-q", "--filter", f"reference={name}").strip())


def archive(name: str) -> Path:
    """A file with the image, as nodes import it. Written anew when the image is another one than before."""
    file = _folder() / (name.replace("/", "_").replace(":", "_") + ".tar")
    identity = _buildah("images", "-q", "--no-trunc", "--filter", f"reference={name}").strip()
    if not identity:
        raise SystemExit(f"there is no image {name}: build it first (make images)")
    stamp = file.with_suffix(".id")
    if not (file.exists() and stamp.exists() and stamp.read_text() == identity):
        file.unlink(missing_ok=True)
        _buildah("push", "-q", name, f"docker-archive:{file}:{name}")
        stamp.write_text(identity)
    return file


def load(files: list[Path], nodes: list[int]) -> None:
    """Every node has the images of these archives."""
    with ThreadPoolExecutor(max_workers=len(nodes)) as at_once:
        for file in files:
            list(at_once.map(partial(import_image, archive=file), nodes))


def pause_archive() -> Path:
    """An archive with the image that holds pods' namespaces: one program."""
    file, program = _folder() / "pause.tar", binary("pause")
    if file.exists() and file.stat().st_mtime_ns > program.stat().st_mtime_ns:
        return file
    layer = _tar({"pause": program.read_bytes()}, mode=0o755)
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]
    texts = {"config.json": json.dumps(settings).encode(), "manifest.json": json.dumps(manifest).encode()}
    file.write_bytes(_tar({**texts, "layer.tar": layer}, mode=0o644))
    return file


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            out.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _folder() -> Path:
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _buildah(*words: str) -> str:
    stores = ["--root", str(_folder() / "store"), "--runroot", str(_folder() / "run"), "--storage-driver", "overlay"]
    return _command("buildah", *stores, *words)


def _command(*words: str) -> str:
    """What it printed. What went wrong, it says itself, on stderr."""
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    return subprocess.run(words, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def _main(context: str, base: str) -> None:
    if base == BASE_IMAGE:
        make_base()
    for name in PROJECT_IMAGES:
        build_image(PROJECT_IMAGES[name], REPOSITORY / "images" / f"{name}.Dockerfile", Path(context), base)
        print(PROJECT_IMAGES[name], flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
