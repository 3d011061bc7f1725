"""`KVPeerTier`: vLLM's interface for a secondary tier, over `TierSide`.

As in `KVPeerConnector`, a wrong configuration raises at start, and afterwards nothing that goes wrong here may reach
the engine. Written for and run with vLLM 0.32.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpeer.client.device import EngineLayout, NativeCopier
from kvpeer.engines.vllm.connection import connect_rank
from kvpeer.engines.vllm.facts import RankLayout
from kvpeer.engines.vllm.guard import guarded
from kvpeer.engines.vllm.metadata import RankFacts
from kvpeer.engines.vllm.stats import METRICS
from kvpeer.engines.vllm.tally import Tally
from kvpeer.engines.vllm_tier.configuration import TIER_TYPE, row_fields, tier_options
from kvpeer.engines.vllm_tier.tier_side import TierSide
from kvpeer.metrics.metric import LATENCY_BUCKETS_S, MetricType
from kvpeer.model import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["KVPeerTier"]

_logger = init_logger("vllm.kvpeer")


class KVPeerTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """See the module docstring. Misses until `attach`, which the connector calls at the end of the engine's start.

    Pages lie in an agent's pool, so a request whose `kv_load_tiers` allows local tiers alone does not use it.
    """

    medium: ClassVar[Medium] = Medium.CPU
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.P2P

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if tier_type != TIER_TYPE:
            raise ConfigError(
                f'write the tier as {{"type": "{TIER_TYPE}"}} without a module_path, not as {tier_type!r}, and set '
                '"kv_connector": "KVPeerOffloadingConnector", "kv_connector_module_path": "kvpeer.engines.vllm_tier"'
            )
        self.locality = Locality.REMOTE
        self._tally = Tally()
        self._settings = tier_options(options, os.environ)
        self._side = TierSide(
            self._settings,
            offloading_spec.tokens_per_block[0] * offloading_spec.blocks_per_chunk,
            self._tally,
            clock=time.monotonic,
            nonce=lambda: secrets.token_hex(16),
        )

    # ---- start and end

    def attach(self, engine: RankFacts, name: str) -> None:
        """Connects to the agent: `engine` is what all ranks agree on, `name` the engine's.

        Raises:
            ConfigError: there can be no agent as things are; the message names the fix.
        """
        n_rows, row_bytes = self._primary_kv_view.shape[0], self.block_size_bytes
        spec = self._offloading_spec
        fields = {
            **engine.namespace_fields,
            **row_fields(
                row_bytes=row_bytes,
                blocks=spec.blocks_per_chunk,
                is_canonical=spec.config.canonical_layout,
                is_replicated=spec.replicated_layout,
            ),
        }
        for field, value in sorted(fields.items()):
            _logger.info("kvpeer: namespace %s = %s", field, value)
        # The address alone: vLLM cannot release its view while an array of it exists, and keeps it until `shutdown`.
        address = np.asarray(self._primary_kv_view).ctypes.data
        layout = EngineLayout(
            np.array([address], np.uint64), np.array([row_bytes], np.uint64), np.array([row_bytes], np.uint32)
        )
        rank = RankLayout(RankFacts(fields, 1, 0, row_bytes), layout, NativeCopier(layout), is_writer=True)
        self._side.attach(fields, connect_rank(rank, self._settings, name), row_bytes)
        _logger.info("kvpeer: %d rows of %d bytes can hold pages of peers", n_rows, row_bytes)

    def shutdown(self) -> None:
        """Ends threads and the connection; bounded, and nothing touches the primary tier afterwards."""
        self._side.close()

    # ---- requests

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See `TierSide.request_arrived`. What is in the primary tier already was offered when it came there."""
        self._side.request_arrived(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(lambda: None)
    def unshare(self, request_id: str, reason: str) -> None:
        """See `TierSide.unshare`."""
        self._side.unshare(request_id, reason)

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """See `TierSide.request_over`."""
        self._side.request_over(req_context.req_id)

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See `TierSide.find`."""
        verdict = self._side.find(key, req_context.req_id)
        if verdict is None:
            return LookupResult.RETRY
        return LookupResult.HIT if verdict else LookupResult.MISS

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """See `TierSide.end_step`."""
        self._side.end_step()

    # ---- jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Starts to read pages into rows of the primary tier."""
        self._submit(job_metadata, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Starts to publish rows of the primary tier."""
        self._submit(job_metadata, is_load=False)

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        self._side.take_job(job.job_id, job.req_context.req_id, job.keys, job.chunk_ids.tolist(), is_load=is_load)
        if not self._begin(job.job_id):
            self._side.give_up(job.job_id)

    @guarded(lambda: False)
    def _begin(self, job_id: int) -> bool:
        self._side.begin(job_id)
        return True

    @guarded(tuple)
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See `TierSide.collect`. A job that did not do all it should is not successful, and no error either."""
        return [JobResult(over.job_id, over.is_whole, over.arrived or None) for over in self._side.collect()]

    def drain_jobs(self) -> None:
        """See `TierSide.drain`."""
        self._side.drain()

    @guarded(lambda: None)
    def reset(self) -> None:
        """See `TierSide.reset`."""
        self._side.reset()

    # ---- numbers

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The connector's metrics, under the same names: an engine has the one or the other."""
        return {
            metric.name: OffloadingHistogramMetadata(metric.help, buckets=LATENCY_BUCKETS_S)
            if metric.type is MetricType.HISTOGRAM
            else OffloadingCounterMetadata(metric.help, tuple(metric.labels))
            for metric in METRICS.values()
            if metric.type is not MetricType.GAUGE  # vLLM's offloading has none, and nothing here sets one
        }

    @guarded(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        taken = self._tally.take()
        if taken is None:
            return None
        stats = OffloadingConnectorStats()
        for key, labels in taken["counts"].items():
            for label, amount in labels.items():
                stats.increase_counter(METRICS[key].name, amount, (label,) if METRICS[key].labels else ())
        for key, samples in taken["samples"].items():
            for sample in samples:
                stats.observe_histogram(METRICS[key].name, sample)
        return stats
