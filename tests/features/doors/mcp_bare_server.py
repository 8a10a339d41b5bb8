"""A server of MCP over stdio that needs no package and starts in 20 ms: it counts its own calls."""

import json
import os
import sys

STEP = {"name": "step", "description": "Count.", "inputSchema": {"type": "object", "properties": {}}}
count = 0
for line in sys.stdin:
    asked = json.loads(line)
    method, number = asked["method"], asked.get("id")
    if number is None:
        continue
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "bare", "version": "1"},
        }
    elif method == "tools/list":
        result = {"tools": [STEP]}
    elif method == "tools/call":
        count += 1
        result = {"content": [{"type": "text", "text": f"{count} {os.getpid()}"}]}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": method}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}), flush=True)
