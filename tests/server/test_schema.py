"""What the OpenAPI document allows, and what it does not, never makes a server error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.server.conftest import Server

pytestmark = pytest.mark.full

# Of each hundred, by route; those without a body have little to vary.
SHARES = {
    "/generate": 20,
    "/v1/completions": 15,
    "/v1/chat/completions": 20,
    "/v1/responses": 15,
    "/v1/messages": 15,
    "/apply-template": 5,
    "/completion": 10,
    "/infill": 5,
    "/tokenize": 5,
    "/detokenize": 5,
}
N_PLAIN = 10
# 501: what llama-server has and cllm has not, `save` and `restore` of slots.
EXPECTED = {200, 307, 400, 401, 404, 405, 406, 408, 413, 415, 422, 429, 431, 501}


def keep_small(body: Any) -> None:
    """What is generated must end soon: few tokens, in little time."""
    if not isinstance(body, dict) or not body.keys() & {"prompt", "messages", "input"}:
        return
    own = "max_output_tokens" if "input" in body else "max_tokens"
    for name in (own, "max_completion_tokens", "n_predict"):
        value: Any = body.get(name)
        is_many = type(value) in (int, float) and value > 4
        if is_many or (value is None and name == own):
            body[name] = 4
    if type(body.get("timeout")) in (int, float) and body["timeout"] > 2:
        body["timeout"] = 2


def send_all(server: Server, operation: Any, mode: Any, n_examples: int) -> Counter[int]:
    """The statuses of so many generated requests."""
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=n_examples, suppress_health_check=list(HealthCheck), print_blob=False)
    def send(case: Any) -> None:
        keep_small(case.body)
        response = case.call(base_url=server.url, timeout=30)
        statuses[response.status_code] += 1
        assert response.status_code in EXPECTED, (case.as_curl_command(), response.text)

    send()
    return statuses


@pytest.mark.parametrize("n_requests", [500, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_generated_requests_make_no_server_error(server: Server, n_requests: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    modes = schemathesis.GenerationMode
    statuses: Counter[int] = Counter()
    operations: Iterable[Any] = schema.get_all_operations()
    for result in operations:
        operation = result.ok()
        share = SHARES.get(operation.path)
        if share is None:  # nothing in it can be wrong
            statuses += send_all(server, operation, modes.POSITIVE, N_PLAIN)
            continue
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            statuses += send_all(server, operation, mode, n_requests * share // 200)
    assert statuses.total() >= n_requests, statuses
    assert statuses[200] > n_requests / 10, statuses
    assert statuses[400] > n_requests / 10, statuses
    server.wait_idle()
    assert server.generate("1+1=").json()["text"] == "2"
    assert server.engine_pids == server.engine_pids[:1]  # the one it began with
