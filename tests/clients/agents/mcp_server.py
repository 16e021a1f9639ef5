"""An MCP server on standard input and output with one tool, whose result has text and an image."""

from __future__ import annotations

import json
import sys
from typing import Any

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TOOL = {
    "name": "picture",
    "description": "A picture of a city",
    "inputSchema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "pictures", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = {"type": "text", "text": f"This is {params['arguments']['city']}."}
        return {"content": [text, {"type": "image", "mimeType": "image/png", "data": PIXEL}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            result = answer(asked["method"], asked.get("params", {}))
            said = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result})
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()
