"""A process that runs a Ray cluster on this machine and obeys commands.

    python -m tests.ray.cluster ENGINE SERVER CLUSTER --port PORT [--cpus N …]

ENGINE, SERVER and CLUSTER are settings as JSON.  `--cpus` is the number of CPUs of each node; the first node
has the front.  Commands are lines of standard input: `redeploy`, `status`, `add-node`, `remove-node`, `stop`.
The program writes a line of JSON after its start and after each command, and ends with its input.
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
    """Set the environment variables of a test cluster; call this before Ray is imported."""
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
        # Long limits: a slow machine must not look like a broken proxy.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Start a cluster, deploy the app, and obey commands until standard input ends."""
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
    # Nodes have different addresses, as machines have.  HAProxy uses all routers of its own address in
    # turn, and each router has its own table.
    nodes["node_ip_address"] = OTHER_NODES
    others = [cluster.add_node(num_cpus=n, **nodes) for n in given.cpus[1:]]
    ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
    # Only the head node has a front, since two would need the same port.  Replicas of all nodes listen on
    # this host: the network of `tools.loopback_only` has only the loopback device.
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
