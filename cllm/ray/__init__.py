"""Replicas of a whole `cllm serve` on Ray Serve, which places, routes and replaces them (extra `ray`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cllm.errors import extra
from cllm.ray.settings import ClusterSettings

if TYPE_CHECKING:
    from cllm.ray.application import app, build, stop

__all__ = ["ClusterSettings", "app", "build", "stop"]


def __getattr__(name: str) -> Any:
    # Ray takes seconds to import, and settings do not need it.
    if name in ("app", "build", "stop"):
        with extra("ray"):
            from cllm.ray import application

        return getattr(application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
