"""A Ray cluster of this machine's own, in a process: started, asked to do things, stopped.

    python -m tests.ray.cluster ENGINE SERVER CLUSTER --port PORT [--cpus N …]

takes settings as JSON, and the processors of each node, the first of which has the front; writes a line of JSON
for everything that it has done, and reads what to do next from its standard input: `redeploy`, `status`,
`add-node`, `remove-node`, `stop`.  It ends with its input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from cllm import EngineConfig
from cllm.ray import environment
from cllm.server.config import ServerConfig

FIRST_NODE, OTHER_NODES = "127.0.0.1", "127.0.0.2"
TEMPORARY = os.environ.get("CLLM_RAY_DIRECTORY", "/tmp/cllm-ray")


def prepare(affinity: str | None) -> None:
    """Before Ray is imported: what tests need besides."""
    environment.prepare(affinity, os.environ, is_running=False)
    folder = f"{TEMPORARY}/haproxy"
    for path in (folder, f"{TEMPORARY}/ray"):
        Path(path).mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "RAY_TMPDIR": TEMPORARY,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_PORT_QUARANTINE_S": "2",
        # A slow machine is no broken proxy.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Start, serve, obey."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("engine", "server", "cluster"):
        parser.add_argument(name, type=json.loads)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cpus", type=int, nargs="+", default=[8])
    given = parser.parse_args()
    prepare(given.cluster.get("affinity", "session"))
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.config import HTTPOptions

    import cllm.ray

    begun = time.monotonic()
    nodes: dict[str, Any] = {"object_store_memory": 100 << 20}
    head = {**nodes, "num_cpus": given.cpus[0], "include_dashboard": False}
    head["node_ip_address"] = FIRST_NODE
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # An address each, as machines have: HAProxy takes the routers of its own address by turns, and
    # each router has a table of its own.
    nodes["node_ip_address"] = OTHER_NODES
    others = [cluster.add_node(num_cpus=n, **nodes) for n in given.cpus[1:]]
    ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
    # Two fronts on one machine would want one port.  Replicas of all nodes listen on this host: the
    # network of `tools.loopback_only` has the loopback device alone.
    host = "0.0.0.0" if others else FIRST_NODE
    serve.start(http_options=HTTPOptions(host=host, port=given.port, location="HeadOnly"))

    def deploy(**changes: Any) -> None:
        engine, server = EngineConfig(**{**given.engine, **changes}), ServerConfig(**given.server)
        serve.run(cllm.ray.app(engine, server, **given.cluster), name="cllm", route_prefix="/")

    deploy()
    tell(done="start", seconds=time.monotonic() - begun)
    for line in sys.stdin:
        match line.strip():
            case "redeploy":
                deploy(max_queue=given.engine.get("max_queue", 256) + 1)
            case "status":
                app = serve.status().applications["cllm"]
                deployment = app.deployments["cllm"]
                tell(done="status", replicas=dict(deployment.replica_states), status=app.status)
                continue
            case "remove-node":
                cluster.remove_node(others.pop(), allow_graceful=False)
            case "add-node":
                others.append(cluster.add_node(num_cpus=given.cpus[-1], **nodes))
            case "stop":
                cllm.ray.stop()
        tell(done=line.strip(), seconds=time.monotonic() - begun)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
