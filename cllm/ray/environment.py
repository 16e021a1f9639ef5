"""Environment variables that Ray needs before it starts: its processes read them then only.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from cllm.errors import CllmError

# Ray's HAProxy: its Python proxy has half of the tokens/s (docs/ray.md).
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
BALANCE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"
ALWAYS: Mapping[str, str] = {
    HAPROXY: "1",
    # Each change of replicas reloads HAProxy; its old process ends requests that run longer than this.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # Otherwise a proxy would send all requests to replicas of its own machine, which have room for many.
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
BY_SESSION = "hdr(x-session-id)"
BY_PREFIX: Mapping[str, str] = {
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # Bytes of a body that the router gets; HAProxy has two such buffers for each connection.
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "131072",
}


def wanted(affinity: str | None) -> dict[str, str]:
    """Return the environment variables that Ray needs for this affinity, and their values."""
    by_affinity = {"session": {BALANCE: BY_SESSION}, "prefix": BY_PREFIX}
    return {**ALWAYS, **by_affinity.get(affinity or "", {})}


def prepare(affinity: str | None, environ: MutableMapping[str, str], *, is_running: bool) -> None:
    """Set missing variables of `environ`; raise an error if one differs, or is missing while Ray runs.

    Parameters
    ----------
    is_running : bool
        True if Ray runs already: missing variables would have no effect.

    Raises
    ------
    CllmError
        A variable has another value, or is missing although Ray runs; the message has all of them.
    """
    needed = wanted(affinity)
    wrong = {name: value for name, value in needed.items() if environ.get(name, value) != value}
    missing = [name for name in needed if name not in environ]
    if is_running and missing:
        wrong |= {name: needed[name] for name in missing}
    if wrong:
        told = " ".join(f"{name}='{value}'" for name, value in wrong.items())
        raise CllmError(
            f"Ray reads its environment when it starts: set {told} on every machine before `ray start`, "
            "and here"
        )
    for name in missing:
        environ[name] = needed[name]
