import json


def read_stream(chunks):
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            for choice in json.loads(data)["choices"]:
                if text := choice["delta"].get("content"):
                    yield text
