"""`KVPeerConnector`: vLLM's interface, over `SchedulerSide` in the engine core and `WorkerSide` in each rank.

This is the boundary where errors end. At start a wrong configuration raises and vLLM does not come up, with a message
that names the fix. Afterwards nothing that goes wrong here may reach the engine: it is logged, counted as
`kvpeer_vllm_errors_total`, and answered with "nothing to load" or "nothing finished". Written for and run with vLLM
0.32.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpeer.engines.traces import DecisionTraces, TraceSender
from kvpeer.engines.vllm.connection import connect_rank, connect_scheduler, engine_name
from kvpeer.engines.vllm.facts import RankLayout, rank_layout
from kvpeer.engines.vllm.guard import guarded
from kvpeer.engines.vllm.metadata import RankFacts, StepOrders, StepReport, agreed_facts
from kvpeer.engines.vllm.namespace import refuse_unsupported
from kvpeer.engines.vllm.scheduler_side import SchedulerSide, StepSchedule
from kvpeer.engines.vllm.settings import load_settings
from kvpeer.engines.vllm.stats import ConnectorStats, PromMetrics
from kvpeer.engines.vllm.tally import Tally
from kvpeer.engines.vllm.worker_side import WorkerSide
from kvpeer.wire.messages import RequestTrace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVPeerConnector"]

# vLLM's abstract messages have no methods, so ours need not inherit from them and stay importable without vLLM.
KVConnectorMetadata.register(StepOrders)
KVConnectorHandshakeMetadata.register(RankFacts)
KVConnectorWorkerMetadata.register(StepReport)


class KVPeerConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """See the package's docstring for how to use it, the module's for what it does about errors."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config, kv_cache_config)
        self._settings = load_settings(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
        self._tally = Tally()
        self._failed_blocks: set[int] = set()
        self._rank: RankLayout | None = None
        self._worker: WorkerSide | None = None
        self._sender: TraceSender | None = None
        self._scheduler = SchedulerSide(
            self._settings,
            vllm_config.cache_config.block_size,
            self._tally,
            clock=time.monotonic,
            nonce=lambda: secrets.token_hex(16),
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            traces=DecisionTraces(self._trace),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a publish that is dropped is a miss later, and no reason to recompute a preempted request."""
        return False

    # ---- start and end

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Worker: connects this rank to the agent.

        Raises:
            ConfigError: this engine's pages cannot be named or copied.
        """
        rank = self._rank = rank_layout(self._vllm_config, self._kv_cache_config, kv_caches, self._settings)
        self._worker = WorkerSide(
            connect_rank(rank, self._settings, engine_name(self._vllm_config, self._settings)),
            rank.copier,
            part_bytes=rank.facts.part_bytes,
            is_writer=rank.is_writer,
            settings=self._settings,
            clock=time.monotonic,
            tally=self._tally,
        )

    def get_handshake_metadata(self) -> RankFacts | None:
        """Worker: what the scheduler side needs to know of this rank."""
        return self._rank.facts if self._rank is not None else None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankFacts]) -> None:
        """Scheduler: connects to the agent, under the namespace that all ranks agree on.

        Raises:
            ConfigError: ranks differ in something that decides the bytes of a page.
        """
        facts = agreed_facts([metadata[key] for key in sorted(metadata)])
        client = connect_scheduler(facts, self._settings, engine_name(self._vllm_config, self._settings))
        self._sender = TraceSender(client.tell)
        self._scheduler.attach(facts.namespace_fields, client, facts.part_bytes * facts.n_parts)

    def shutdown(self) -> None:
        """Ends threads and connections; bounded."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        self._scheduler.close()

    def _trace(self, trace: RequestTrace, at: float) -> None:
        if self._sender is not None:
            self._sender.add(trace, at)

    # ---- scheduler side

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """See `SchedulerSide.request_arrived`."""
        self._scheduler.request_arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.match`. All loads are asynchronous: a synchronous one would hold up every other
        request."""
        n_tokens = self._scheduler.match(request, num_computed_tokens)
        return n_tokens, bool(n_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `SchedulerSide.allocated`."""
        self._scheduler.allocated(request, lambda: blocks.get_block_ids()[0], num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Splits accepted tokens into those from the own pool (host) and those from peers."""
        own, peers = self._scheduler.hit_sources(request, num_external_tokens)
        return {source: n for source, n in ((CacheHitSource.HOST, own), (CacheHitSource.P2P, peers)) if n}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """See `SchedulerSide.take_orders` and `order_publishes`; only the latter can fail, and then it costs some
        pages."""
        orders = self._scheduler.take_orders(scheduler_output.preempted_req_ids or ())
        self._order_publishes(orders, scheduler_output)
        return orders

    @guarded(lambda: None)
    def _order_publishes(self, orders: StepOrders, scheduler_output: SchedulerOutput) -> None:
        self._scheduler.order_publishes(orders, _step_schedule(scheduler_output))

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `SchedulerSide.step_ended` and `loads_ended`."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._scheduler.step_ended(report)
        self._scheduler.loads_ended(connector_output.finished_recving or ())

    @guarded(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`."""
        return self._scheduler.finished(request.request_id), None

    @guarded(lambda: None)
    def reset_cache(self) -> bool | None:
        """See `SchedulerSide.reset`. True even without an agent: pages of before cannot be found any more."""
        self._scheduler.reset()
        return True

    # ---- worker side

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        """See `WorkerSide.begin_step`. Called at every step, before anything writes to blocks."""
        if self._worker is not None:
            self._worker.begin_step(kv_connector_metadata)

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See `WorkerSide.load`."""
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is not scheduled before its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: whole pages are copied after the step."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """See `WorkerSide.publish`. Does not wait: the blocks are held until their copies are over."""
        if self._worker is not None:
            self._worker.publish(self._get_connector_metadata())

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `WorkerSide.collect`."""
        if self._worker is None:
            return None, None
        collected = self._worker.collect(self._get_connector_metadata(), finished_req_ids)
        self._failed_blocks |= collected.failed_blocks
        return collected.sent, collected.received

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> StepReport | None:
        """See `WorkerSide.report`. vLLM calls it after `get_finished` in the same step."""
        return self._worker.report(self._get_connector_metadata()) if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The failed blocks of the loads that the last `get_finished` returned: vLLM calls both in the same step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # ---- numbers

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What this side counted since the last call."""
        taken = self._tally.take()
        return ConnectorStats(data=taken) if taken is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """The stats that another process serialised."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """kvpeer's metrics in vLLM's /metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _step_schedule(output: SchedulerOutput) -> StepSchedule:
    drafts = output.scheduled_spec_decode_tokens
    computed = [(request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    computed.extend(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    requests = [
        (request_id, n_computed, output.num_scheduled_tokens[request_id], len(drafts.get(request_id, ())))
        for request_id, n_computed in computed
    ]
    state = output.kv_connector_block_state
    return StepSchedule(requests, lambda request_id: state.get_block_ids(request_id)[0])
