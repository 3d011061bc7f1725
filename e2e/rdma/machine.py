"""Runs a command in a small machine with RDMA devices: QEMU's own emulation (no /dev/kvm) of Debian's kernel.

    python -m rdma.machine --image build/guest -- 'python -m pytest -k verbs runtime/tests'

The guest's root is this host's root, read-only under a layer in its memory; so compilers, environments and built tests
are there at their own paths, and nothing that the command writes stays but what it writes into the share (IMAGE/share).
The command runs in the caller's folder by bash, its output comes out here, and so does its exit status: 124 when the
time is up, 125 when the machine ended without one. Speeds measured in it say nothing of any hardware.
"""

from __future__ import annotations

import argparse
import lzma
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["NO_STATUS", "TIMED_OUT", "Image", "run"]

TIMED_OUT = 124
NO_STATUS = 125

INIT = Path(__file__).with_name("init.sh")
RXE = Path(__file__).with_name("rxe.sh")

BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""What the guest needs to reach the host's root; the kernel has the rest of its modules from there."""

XZ_MAGIC = b"\xfd7zXZ\x00"

CONSOLE_CHARS_MAX = 4000
"""Of the kernel's console that is shown when the machine ended without a status."""


class Image:
    """What boots: an unpacked kernel package, and what is made of it once. `folder`: as install.sh left it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()  # the guest follows no link of the host on its way to the modules
        kernels = sorted((self._folder / "kernel" / "boot").glob("vmlinuz-*"))
        if not kernels:
            raise SystemExit(f"{folder} has no kernel: run e2e/rdma/install.sh {folder}")
        self._kernel = kernels[-1]
        self.modules = self._folder / "kernel" / "lib" / "modules"
        self.share = self._folder / "share"
        self.share.mkdir(exist_ok=True)

    @property
    def kernel(self) -> Path:
        """The uncompressed kernel: decompressing it under emulation would take seconds at every boot."""
        made = self._folder / "vmlinux"
        if not made.exists():
            packed = self._kernel.read_bytes()
            at = packed.index(XZ_MAGIC)
            _write_whole(made, lzma.LZMADecompressor().decompress(packed[at:]))
        return made

    @property
    def initramfs(self) -> Path:
        """busybox, init.sh, and the modules that it loads, in the order of their dependencies."""
        made = self._folder / "initramfs.cpio"
        if not made.exists() or made.stat().st_mtime < INIT.stat().st_mtime:
            with tempfile.TemporaryDirectory() as folder:
                self._lay_out(Path(folder))
                names = subprocess.run(["find", "."], cwd=folder, check=True, capture_output=True).stdout
                archive = ["cpio", "--create", "--format=newc", "--quiet"]
                packed = subprocess.run(archive, cwd=folder, input=names, check=True, capture_output=True).stdout
            _write_whole(made, packed)
        return made

    def _lay_out(self, root: Path) -> None:
        for name in ("bin", "proc", "sys", "dev", "lower", "written", "root", "modules"):
            (root / name).mkdir()
        shutil.copy("/bin/busybox", root / "bin" / "busybox")
        shutil.copy(INIT, root / "init")
        (root / "init").chmod(0o755)
        version = self._kernel.name.removeprefix("vmlinuz-")
        for number, module in enumerate(_in_order(self.modules / version)):
            packed = module.read_bytes()
            plain = lzma.decompress(packed) if module.suffix == ".xz" else packed
            (root / "modules" / f"{number:02d}.ko").write_bytes(plain)


def run(image: Image, command: str, *, devices: int, memory_mib: int, cpus: int, timeout_s: float) -> int:
    """Boots a machine with so many RDMA devices, runs the command, and returns its exit status."""
    status = image.share / "status"
    status.unlink(missing_ok=True)
    script = f"set -e\nbash {shlex.quote(str(RXE))} {devices}\ncd {shlex.quote(str(Path.cwd()))}\nset +e\n{command}\n"
    (image.share / "command").write_text(script)
    console = image.share / "console.log"
    machine = subprocess.Popen(_qemu(image, console, memory_mib, cpus), stdin=subprocess.DEVNULL)
    try:
        machine.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"the machine did not end within {timeout_s:g} s", file=sys.stderr)
        return TIMED_OUT
    finally:
        machine.kill()
        machine.wait()
    if status.exists():
        return int(status.read_text())
    print(console.read_text(errors="replace")[-CONSOLE_CHARS_MAX:], file=sys.stderr)
    return NO_STATUS


def _qemu(image: Image, console: Path, memory_mib: int, cpus: int) -> list[str]:
    # The HPET's rate is known. That of the TSC is measured at boot, and comes out wrong where the host is busy: clocks
    # that ran seven times too fast were seen, and with them every deadline of a test.
    append = (
        "console=ttyS0 quiet panic=-1 clocksource=hpet no_timer_check mitigations=off nokaslr audit=0 "
        f"random.trust_cpu=on guest.share={image.share} guest.modules={image.modules}"
    )
    return [
        "qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max",
        "-smp", str(cpus), "-m", str(memory_mib), "-nodefaults", "-display", "none", "-no-reboot",
        "-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append", append,
        "-serial", f"file:{console}", "-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out",
        "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
        *_shared("root", "/", ",readonly=on,multidevs=remap"), *_shared("share", str(image.share)),
    ]  # fmt: skip


def _shared(name: str, folder: str, more: str = "") -> list[str]:
    device = f"virtio-9p-pci,fsdev={name},mount_tag={name}"
    return ["-fsdev", f"local,id={name},path={folder},security_model=none{more}", "-device", device]


def _in_order(folder: Path) -> list[Path]:
    """The files of BOOT_MODULES and of all that they need; what is needed comes first."""
    lines = (folder / "modules.dep").read_text().splitlines()
    needs = {path: needed.split() for path, _, needed in (line.partition(":") for line in lines)}
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for needed in reversed(needs[path]):
            add(needed)
        order[path] = None

    for name in BOOT_MODULES:
        if name in by_name:  # else it is built in
            add(by_name[name])
    return [folder / path for path in order]


def _write_whole(path: Path, content: bytes) -> None:
    """A run that is interrupted leaves no half of a file that the next one would take."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)


def main() -> int:
    """The command line; returns the status to exit with."""
    parser = argparse.ArgumentParser(description="Runs a command in a small machine with RDMA devices.")
    parser.add_argument("--image", type=Path, required=True, help="folder that install.sh filled")
    parser.add_argument("--devices", type=int, default=2, help="soft-RoCE devices rxe0, rxe1, ...")
    parser.add_argument("--memory-mib", type=int, default=2048)
    parser.add_argument("--cpus", type=int, default=1, help="emulated ones; two are no faster on two real ones")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("command", nargs="+", help="for bash")
    given = parser.parse_args()
    began = time.monotonic()
    status = run(
        Image(given.image),
        " ".join(given.command),
        devices=given.devices,
        memory_mib=given.memory_mib,
        cpus=given.cpus,
        timeout_s=given.timeout_s,
    )
    print(f"guest: {time.monotonic() - began:.1f} s, status {status}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
