"""What can be wrong with a machine, by name, and what to do about it: the closed list of docs/topology.md.

A *problem* is something that whoever runs the machine can put right. A *note* is a fact that costs something and may be
as it should be; with RDMA required, what leaves an agent without it is a problem too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

__all__ = ["FIXES", "Fix", "Problem", "ProblemName", "Severity", "collect"]


class Severity(str, Enum):
    """Whether somebody should do something."""

    PROBLEM = "problem"
    NOTE = "note"


class ProblemName(str, Enum):
    """Names are stable: metrics, alerts and documents use them."""

    SYSFS_UNREADABLE = "sysfs_unreadable"
    DEVICE_UNKNOWN = "device_unknown"
    GPU_UNKNOWN = "gpu_unknown"
    NO_RDMA_DEVICE = "no_rdma_device"
    NO_DEVICE_IN_CONTAINER = "no_device_in_container"
    DEVICE_NOT_IN_CONTAINER = "device_not_in_container"
    DEVICE_REFUSED = "device_refused"
    EFA_NEEDS_NIXL = "efa_needs_nixl"
    PORT_DOWN = "port_down"
    OTHER_PORT_DOWN = "other_port_down"
    NO_SUBNET_MANAGER = "no_subnet_manager"
    GID_MISSING = "gid_missing"
    GID_LINK_LOCAL_ONLY = "gid_link_local_only"
    ROCE_V1_ONLY = "roce_v1_only"
    MTU_SMALL = "mtu_small"
    SLOW_NIC_LEFT_OUT = "slow_nic_left_out"
    OTHER_FABRIC_LEFT_OUT = "other_fabric_left_out"
    NIC_ON_OTHER_NODE = "nic_on_other_node"
    NIC_WITHOUT_NODE = "nic_without_node"
    NO_CPU_NEAR = "no_cpu_near"
    MEMORY_NODE_FORBIDDEN = "memory_node_forbidden"
    MBIND_REFUSED = "mbind_refused"
    MOVE_PAGES_REFUSED = "move_pages_refused"
    AFFINITY_REFUSED = "affinity_refused"
    POOL_ON_OTHER_NODE = "pool_on_other_node"
    MEMLOCK_LOW = "memlock_low"
    MEMORY_LIMIT_LOW = "memory_limit_low"
    HUGEPAGES_SHORT = "hugepages_short"
    MEMFD_UNSEALABLE = "memfd_unsealable"
    SHM_SMALL = "shm_small"


@dataclass(frozen=True, slots=True)
class Fix:
    """What a problem means, and what puts it right. `matters_for_rdma`: no mere note where RDMA is required."""

    severity: Severity
    meaning: str
    fix: str
    matters_for_rdma: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of thing that is wrong, with all that it is wrong with."""

    name: ProblemName
    subjects: tuple[str, ...]
    severity: Severity

    @property
    def meaning(self) -> str:
        """What it means."""
        return FIXES[self.name].meaning

    @property
    def fix(self) -> str:
        """What puts it right."""
        return FIXES[self.name].fix


def collect(found: Iterable[tuple[ProblemName, str]], *, requires_rdma: bool) -> tuple[Problem, ...]:
    """One problem a name, in the order of the list, each with its subjects in the order they were found, once."""
    subjects: dict[ProblemName, dict[str, None]] = {}
    for name, subject in found:
        subjects.setdefault(name, {})[subject] = None
    return tuple(
        Problem(name, tuple(subjects[name]), _severity(name, requires_rdma)) for name in FIXES if name in subjects
    )


def _severity(name: ProblemName, requires_rdma: bool) -> Severity:
    fix = FIXES[name]
    return Severity.PROBLEM if requires_rdma and fix.matters_for_rdma else fix.severity


def _problem(meaning: str, fix: str) -> Fix:
    return Fix(Severity.PROBLEM, meaning, fix)


def _note(meaning: str, fix: str, *, matters_for_rdma: bool = False) -> Fix:
    return Fix(Severity.NOTE, meaning, fix, matters_for_rdma)


FIXES: Mapping[ProblemName, Fix] = MappingProxyType(
    {
        ProblemName.SYSFS_UNREADABLE: _problem(
            "A file of /sys or /proc that describes the machine cannot be read, so part of the plan is a guess.",
            "Mount /sys into the container (read-only is enough) and let the agent read it.",
        ),
        ProblemName.DEVICE_UNKNOWN: _problem(
            "topology.devices names an RDMA device that this machine does not have.",
            "Correct topology.devices, or leave it empty to use all; `rdma link` lists the names.",
        ),
        ProblemName.GPU_UNKNOWN: _problem(
            "topology.gpus names a PCI address where there is no GPU.",
            "Correct topology.gpus; `nvidia-smi --query-gpu=pci.bus_id --format=csv` lists the addresses.",
        ),
        ProblemName.NO_RDMA_DEVICE: _note(
            "The machine has no RDMA device, so pages go by tcp.",
            "Nothing, if that is intended; otherwise load the NIC's driver (mlx5_ib, irdma, bnxt_re, ...).",
            matters_for_rdma=True,
        ),
        ProblemName.NO_DEVICE_IN_CONTAINER: _note(
            "The machine has RDMA devices, but this container was given none of them, so pages go by tcp.",
            "Request the RDMA resource of the device plugin in the pod (such as rdma/hca: 1), or pass "
            "--device /dev/infiniband to the container.",
            matters_for_rdma=True,
        ),
        ProblemName.DEVICE_NOT_IN_CONTAINER: _note(
            "A device that sysfs shows is not in this container; it is not used.",
            "Nothing, if it was given to another pod; otherwise request more devices, or all of them.",
        ),
        ProblemName.DEVICE_REFUSED: _problem(
            "The device's file is in this container, but the kernel refuses to open it.",
            "Let the container's device cgroup allow it: use the device plugin instead of a mount of /dev, and check "
            "that the agent's user may read and write the file.",
        ),
        ProblemName.EFA_NEEDS_NIXL: _note(
            "EFA has no reliable connections, which one-sided reads over verbs need; pages go by tcp.",
            "Nothing, for tcp; EFA is served by NIXL's libfabric only.",
            matters_for_rdma=True,
        ),
        ProblemName.PORT_DOWN: _problem(
            "No port of a device has a link.",
            "Check cable, transceiver and switch, and bring its interface up (ip link set <interface> up).",
        ),
        ProblemName.OTHER_PORT_DOWN: _note(
            "A port has no link, while another port of the same device has.",
            "Nothing, if it is not meant to be connected; otherwise check its cable, transceiver and switch.",
        ),
        ProblemName.NO_SUBNET_MANAGER: _problem(
            "An InfiniBand port has a link, but no subnet manager has configured it.",
            "Start a subnet manager in that fabric (opensm, or the one of the switch).",
        ),
        ProblemName.GID_MISSING: _problem(
            "A port that is up has no address (GID).",
            "Bring the interface of the port up in this network namespace, and give it an IP address.",
        ),
        ProblemName.GID_LINK_LOCAL_ONLY: _problem(
            "A RoCE port has link-local addresses only, which peers cannot be told; it is not used.",
            "Give the interface of the port an IPv4 or a global IPv6 address.",
        ),
        ProblemName.ROCE_V1_ONLY: _problem(
            "A port has RoCE v1 addresses only, which no router passes on.",
            "Enable RoCE v2 (for mlx5: cma_roce_mode -d <device> -p 1 -m 2, and a firmware that has it).",
        ),
        ProblemName.MTU_SMALL: _note(
            "The interface of a RoCE port has an MTU below 4200, so its packets carry less than 4096 bytes.",
            "Set the MTU of interfaces and switches to 9000 (ip link set <interface> mtu 9000).",
        ),
        ProblemName.SLOW_NIC_LEFT_OUT: _note(
            "A port has less than half the rate of the fastest one; an equal share of pages would wait for it.",
            "Nothing, if it is there for storage or management; otherwise name the ports to use in topology.devices.",
        ),
        ProblemName.OTHER_FABRIC_LEFT_OUT: _note(
            "Ports speak InfiniBand, RoCE v2 or RoCE v1, and peers are reached by one of them only: the one with more "
            "bandwidth in sum.",
            "Nothing, if that kind is the right one; otherwise name the ports to use in topology.devices.",
        ),
        ProblemName.NIC_ON_OTHER_NODE: _note(
            "A rank's NIC is on another NUMA node than its GPU: pages cross the link between the CPUs.",
            "Nothing, if there is no usable NIC nearer; otherwise let the kubelet align them (topologyManagerPolicy: "
            "restricted or single-numa-node).",
        ),
        ProblemName.NIC_WITHOUT_NODE: _note(
            "The kernel does not know the NUMA node of a NIC, so nothing can be placed near it.",
            "Expose the NUMA topology to the virtual machine, or update the firmware (ACPI _PXM of the root bus).",
        ),
        ProblemName.NO_CPU_NEAR: _problem(
            "The container's cpuset has no CPU on the nodes of the pool: serving crosses the link between the CPUs.",
            "Give the agent CPUs there (kubelet: topologyManagerPolicy; docker: --cpuset-cpus), or set topology.numa: "
            "none.",
        ),
        ProblemName.MEMORY_NODE_FORBIDDEN: _problem(
            "The container's cpuset forbids memory of a node that the pool should be on.",
            "Allow that node (docker: --cpuset-mems; kubelet: memoryManagerPolicy and topologyManagerPolicy).",
        ),
        ProblemName.MBIND_REFUSED: _problem(
            "The kernel refuses mbind, so that the pool lies on the node of the thread that opens it.",
            "Allow the call: add the capability SYS_NICE, which the default seccomp profiles ask for, or use a "
            "profile that has mbind; or set topology.numa: none.",
        ),
        ProblemName.MOVE_PAGES_REFUSED: _note(
            "The kernel refuses move_pages, so that nobody can tell on which nodes the pool lies.",
            "Allow the call in the container's seccomp profile.",
        ),
        ProblemName.AFFINITY_REFUSED: _problem(
            "The kernel refuses to keep the agent's threads on the CPUs of the plan.",
            "Allow sched_setaffinity in the container's seccomp profile, or set topology.numa: none.",
        ),
        ProblemName.POOL_ON_OTHER_NODE: _problem(
            "Some of the pool lies on other nodes than planned, usually because those had none free.",
            "Make the pool smaller, or leave more memory free on the node (numactl --hardware shows it).",
        ),
        ProblemName.MEMLOCK_LOW: _problem(
            "The agent may not lock as much memory as the pool has, so that a NIC cannot be given it.",
            "Add the capability IPC_LOCK to the agent's container, or raise the limit (LimitMEMLOCK=infinity in "
            "systemd, --ulimit memlock=-1 in docker).",
        ),
        ProblemName.MEMORY_LIMIT_LOW: _problem(
            "The container's memory limit, or the host's memory, is too small for the pool, which will stop growing.",
            "Raise the container's memory limit 256 MiB and the engine's needs above pool.size, or lower pool.size.",
        ),
        ProblemName.HUGEPAGES_SHORT: _problem(
            "Fewer huge pages are reserved than the pool needs.",
            "Reserve more (vm.nr_hugepages, or hugepages= on the kernel's command line, and hugepages-<size> in the "
            "pod's resources), or set pool.hugepages: none.",
        ),
        ProblemName.MEMFD_UNSEALABLE: _problem(
            "The kernel refuses memory files that can be sealed (memfd_create), which the pool is.",
            "Allow memfd_create in the container's seccomp profile; huge pages need Linux 4.16.",
        ),
        ProblemName.SHM_SMALL: _note(
            "Shared memory (/dev/shm) is small. kvpeer does not use it, but engines with several ranks do.",
            "Mount a memory-backed emptyDir at /dev/shm in the pod (docker: --shm-size).",
        ),
    }
)
"""Every problem; the order is that of the list in docs and output."""
