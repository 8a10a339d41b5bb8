"""A server of MCP over stdio that writes to its output whatever a call asks for, `ID` being the call's number."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"raw": {"type": "string"}}}
for line in sys.stdin:
    asked = json.loads(line)
    method, number = asked["method"], asked.get("id")
    if number is None:
        continue
    if method == "tools/call":
        raw = asked["params"]["arguments"]["raw"].replace("ID", str(number))
        sys.stdout.buffer.write(raw.encode("latin1") + b"\n")
        sys.stdout.buffer.flush()
        continue
    result = {
        "initialize": {
            "protocolVersion": asked.get("params", {}).get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "odd", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "say", "description": "Say.", "inputSchema": SCHEMA}]},
    }.get(method)
    answer = {"result": result} if result else {"error": {"code": -32601, "message": method}}
    print(json.dumps({"jsonrpc": "2.0", "id": number} | answer), flush=True)
