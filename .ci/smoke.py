"""Ask a running server for one streamed answer with nothing but the standard library.

Usage: smoke.py PORT. Exits with status 1 unless the bundled model's answer arrives whole.
"""

from __future__ import annotations

import http.client
import json
import sys
import time

BODY = {
    "model": "ksl-nano",
    "stream": True,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


def wait_ready(port: int, deadline_s: float = 60) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the server did not become ready")


def main() -> None:
    port = int(sys.argv[1])
    wait_ready(port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"status {response.status}: {response.read()!r}")
    lines = [line for line in response.read().decode().splitlines() if line.startswith("data: ")]
    if lines[-1] != "data: [DONE]":
        sys.exit(f"the stream ended with {lines[-1]!r}")
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    print(f"streamed {len(chunks)} chunks: {text!r}")
    if "Paris" not in text:
        sys.exit("that is not the bundled model's answer")


if __name__ == "__main__":
    main()
