"""The one place where metrics are defined (`definitions`) and made (`build`)."""

from kvpeer.metrics.registry import Metrics, build

__all__ = ["Metrics", "build"]
