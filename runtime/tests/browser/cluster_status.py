"""Statuses of clusters of any size, as an inspector makes them, for pages that show them."""

from __future__ import annotations

import random
from typing import Any

from kvpeer.core.cohort_comparison import EngineGroup, compare

GIB = 1 << 30
NAMESPACES = {
    "3f9ac01b77d2e845": {
        "engine": "vllm", "engine_version": "0.32.0", "weights": "Qwen/Qwen3-32B@9216db5781bf", "dtype": "bfloat16",
        "page_tokens": "16", "parallel": "tp=2,pp=1,cp=1,replicas=1", "hash": "sha256:vllm-none-hash",
    },
    "a07be4419d5c2210": {
        "engine": "vllm", "engine_version": "0.31.2", "weights": "Qwen/Qwen3-32B@9216db5781bf", "dtype": "bfloat16",
        "page_tokens": "16", "parallel": "tp=4,pp=1,cp=1,replicas=1", "hash": "sha256:vllm-none-hash",
    },
}  # fmt: skip
REASONS = (
    ("decision.pull", "loaded"), ("decision.pull", "loaded"), ("decision.pull", "partly_loaded"),
    ("decision.nothing_found", "computed"), ("decision.not_worth_it", "computed"), ("request.local_hit", "computed"),
)  # fmt: skip
SLOW_PEER = {
    "name": "peer_failing", "severity": "problem", "subject": "decode-003",
    "meaning": "It fails repeatedly when asked for pages, and is left alone for a while.",
    "fix": "See that agent's log and the network between: ports of the control and data channels, certificates, CPU.",
}  # fmt: skip
NO_RDMA = {
    "name": "no_rdma_device", "severity": "note", "subject": "machine",
    "meaning": "The machine has no RDMA device, so pages go by tcp.",
    "fix": "Nothing, if that is intended; otherwise load the NIC's driver (mlx5_ib, irdma, bnxt_re, ...).",
}  # fmt: skip


def cluster_status(n_members: int, *, n_requests: int = 0, seed: int = 1) -> dict[str, Any]:
    """A cluster in which members read from a few others each; the third is left alone by the first."""
    rng = random.Random(seed)
    ids = [rng.randbytes(16).hex() for _ in range(n_members)]
    names = [f"decode-{number:03d}" for number in range(n_members)]
    members = [_member(rng, place, ids, names, n_requests) for place in range(n_members)]
    groups = [
        EngineGroup(member["name"], cohort["namespace"], cohort["description"], cohort["page_bytes"], cohort["n_parts"],
                    cohort["engines"], cohort["pages"])
        for member in members for cohort in member["status"]["cohorts"]
    ]  # fmt: skip
    problems = [{"agent": member["name"], **found} for member in members for found in member["status"]["problems"]]
    return {
        "schema": 1, "at": 1_790_000_000.0 + n_requests, "cluster": "inference", "members": members,
        "asked": {"id": ids[0], "name": names[0]}, "cohorts": compare(groups), "problems": problems,
    }  # fmt: skip


def _member(rng: random.Random, place: int, ids: list[str], names: list[str], n_requests: int) -> dict[str, Any]:
    namespace = "a07be4419d5c2210" if place % 10 == 9 else "3f9ac01b77d2e845"
    used = rng.uniform(0.2, 0.97) * 64 * GIB
    peers = [_peer(rng, ids[other], is_failing=place == 0 and other == 3) for other in _others(rng, place, len(ids))]
    return {
        "id": ids[place], "name": names[place], "host": f"10.1.{place // 200}.{place % 200 + 10}",
        "state": "suspect" if place == 3 else "alive",
        "status": {
            "id": ids[place], "name": names[place], "host": "", "version": "0.1.0", "uptime_s": 3600.0 + 977 * place,
            "verify": "full", "security": "shared_secret", "transport": "tcp", "health": "",
            "tiers": {
                "pool": {"capacity_bytes": 64 * GIB, "used_bytes": used, "unopened_bytes": 0, "pages": int(used / 2e6),
                         "pins": 0, "evicted_pages": rng.randrange(50_000)},
                "disk": {"capacity_bytes": 500 * GIB, "used_bytes": 3 * used, "pages": int(used / 7e5),
                         "condition": "ok"}
                if place % 3 == 0 else None,
            },
            "cohorts": [{"namespace": namespace, "description": NAMESPACES[namespace], "page_bytes": 4 << 20,
                         "n_parts": 2, "engines": 3, "pages": int(used / 2e6)}],
            "peers": peers,
            "decisions": {"decision.pull": 40 + n_requests, "decision.nothing_found": 9, "decision.not_worth_it": 5},
            "prefixes": [{"key": f"{0x5ca1ab1e + hot:08x}", "requests": 30 - 4 * hot, "fetched_pages": 900 - 90 * hot}
                         for hot in range(4)],
            "recent": [_request(rng, place, number, ids) for number in range(10)],
            "problems": ([SLOW_PEER] if place == 0 else []) + ([NO_RDMA] if place % 5 == 0 else []),
            "traces": {"kept": 900, "bytes": 2_000_000, "dropped": 0},
        },
    }  # fmt: skip


def _others(rng: random.Random, place: int, n: int) -> list[int]:
    others = {(place + rng.randrange(1, n)) % n for _ in range(4)} if n > 1 else set()
    return sorted(others | ({3} if place == 0 and n > 3 else set()))


def _peer(rng: random.Random, agent_id: str, *, is_failing: bool) -> dict[str, Any]:
    n_pages = rng.randrange(200, 9000)
    return {
        "id": agent_id, "breakers": {"lookup": "closed", "data": "open" if is_failing else "closed"},
        "transport": "tcp", "pages": n_pages, "failed_pages": 17 if is_failing else 0, "bytes": n_pages << 22,
        "rate_bytes_per_s": 0 if is_failing else rng.randrange(1 * GIB, 9 * GIB),
        "latency_s": rng.uniform(0.0008, 0.004), "last_s": 0.4, "error": "no answer in 2 s" if is_failing else "",
    }  # fmt: skip


def _request(rng: random.Random, place: int, number: int, ids: list[str]) -> dict[str, Any]:
    reason, outcome = rng.choice(REASONS)
    is_pull = reason == "decision.pull"
    n_tokens = rng.randrange(900, 24_000)
    return {
        "request": f"cmpl-{rng.randbytes(8).hex()}", "age_s": round(rng.uniform(0.5, 240), 1), "reason": reason,
        "outcome": outcome, "prompt_tokens": n_tokens, "loaded_tokens": n_tokens // 16 * 16 - 16 if is_pull else 0,
        "load_s": rng.uniform(0.01, 0.4) if is_pull else 0.0, "sources": [rng.choice(ids)] if is_pull else [],
        "summary": "",
    }  # fmt: skip
