"""Answers that look right and are not, with the symptom that each must be told.

All of them have been in clients, benchmarks and servers: chunks taken for events, characters
decoded in halves, TPOT over n tokens, stop strings searched piece by piece, NaN and True let in.
"""

STREAM = """
import json

def read_stream(chunks):
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        while b"\\n" in buffer:
            line, buffer = buffer.split(b"\\n", 1)
            {line}
            if data == b"[DONE]":
                {done}
            {out}
"""
LINE = """if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()"""
OUT = """for choice in json.loads(data)["choices"]:
                if text := choice["delta"].get("content"):
                    yield text"""

TIMES = """
def latencies(sent, token_times):
    ttft = {ttft}
    gaps = len(token_times) - 1
    tpot = {tpot}
    return ttft, tpot

def goodput(requests, seconds, max_ttft, max_tpot):
    kept = 0
    for sent, token_times in requests:
        ttft, tpot = latencies(sent, token_times)
        kept += {kept}
    return kept / seconds
"""
RIGHT_TIMES = {
    "ttft": "token_times[0] - sent",
    "tpot": "(token_times[-1] - token_times[0]) / gaps if gaps else None",
    "kept": "ttft <= max_ttft and (tpot is None or tpot <= max_tpot)",
}

UTF8 = """
def incomplete(data):
    for back, byte in enumerate(reversed(data[-3:]), start=1):
        if 0x80 <= byte <= 0xBF:
            continue
        length = {length}
        return {held}
    return {stray}
"""
LENGTH = (
    "2 if 0xC2 <= byte <= 0xDF else 3 if byte >> 4 == 0xE else 4 if 0xF0 <= byte <= 0xF4 else 1"
)
RIGHT_UTF8 = {"length": LENGTH, "held": "back if back < length else 0", "stray": "0"}

SCANNER = """
class StopScanner:
    def __init__(self, stop, include=False):
        self.stop, self.include = stop, include
        self.stopped_by, self.held = None, ""

    def push(self, piece):
        if self.stopped_by is not None:
            return ""
        text = {text}
        found = [({end}, n) for n, s in enumerate(self.stop) if s in {where}]
        if found:
            end, n = min(found)
            self.stopped_by, self.held = self.stop[n], ""
            return {cut}
        starts = {starts}
        safe = max(0, len(text) - max(starts, default=0))
        self.held = text[safe:]
        return text[:safe]

    def finish(self):
        {finish}
"""
RIGHT_SCANNER = {
    "text": "self.held + piece",
    "end": "text.find(s) + len(s)",
    "where": "text",
    "cut": "text[:end] if self.include else text[:end - len(self.stop[n])]",
    "starts": "(k for s in self.stop for k in range(1, len(s)) if text.endswith(s[:k]))",
    "finish": 'held, self.held = self.held, ""\n        return held',
}

FIELDS = """
def first_bad_field(body, rules):
    for name, value in body.items():
        if name not in rules:
            {unknown}
        kind, low, high = rules[name]
        types = int if kind == "integer" else {number}
        if value is None:
            continue
        if {wrong_type}:
            return name
        if {outside}:
            return name
    return None
"""
RIGHT_FIELDS = {
    "unknown": "return name",
    "number": "(int, float)",
    "wrong_type": "isinstance(value, bool) or not isinstance(value, types)",
    "outside": "not low <= value <= high",
}


def stream(line: str = LINE, done: str = "return", out: str = OUT) -> str:
    """A version of exercise 00.1."""
    return STREAM.format(line=line, done=done, out=out)


WRONG: dict[str, list[tuple[str, str]]] = {
    "00.1": [
        (
            """
import json

def read_stream(chunks):
    for chunk in chunks:
        data = chunk.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if text := json.loads(data)["choices"][0]["delta"].get("content"):
            yield text
""",
            r"what was read as an event is not one line|an event may have no choices",
        ),
        (
            """
import json

def read_stream(chunks):
    buffer = ""
    for chunk in chunks:
        buffer += chunk.decode()
        while "\\n" in buffer:
            line, buffer = buffer.split("\\n", 1)
            if line.startswith("data:") and "[DONE]" not in line:
                for choice in json.loads(line[5:])["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
""",
            r"UnicodeDecodeError: a chunk may end inside a character",
        ),
        (
            """
import json

def read_stream(chunks):
    buffer = ""
    for chunk in chunks:
        buffer += chunk.decode(errors="replace")
        while "\\n" in buffer:
            line, buffer = buffer.split("\\n", 1)
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                for choice in json.loads(line[5:])["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
""",
            r"a character was decoded in two halves",
        ),
        (stream(done="pass"), r"data: \[DONE\], is no JSON"),
        (
            stream(out='yield json.loads(data)["choices"][0]["delta"]["content"]'),
            r"an event may have no choices",
        ),
        (
            stream().replace("def read_stream", "def pieces")
            + "\ndef read_stream(chunks):\n    return iter(list(pieces(chunks)))\n",
            r"the user stares at an empty screen",
        ),
        (
            stream(
                line='data = line.removeprefix(b"data:").strip()\n            if not data: continue'
            ),
            r"comments between the events: JSONDecodeError",
        ),
    ],
    "00.2": [
        (
            TIMES.format(
                **RIGHT_TIMES
                | {"tpot": "(token_times[-1] - token_times[0]) / (gaps + 1) if gaps else None"}
            ),
            r"there are \d+ gaps between them, so every server looks a little faster",
        ),
        (
            TIMES.format(
                **RIGHT_TIMES | {"tpot": "(token_times[-1] - sent) / (gaps + 1) if gaps else None"}
            ),
            r"the wait for the first token is in it",
        ),
        (
            TIMES.format(
                **RIGHT_TIMES | {"tpot": RIGHT_TIMES["tpot"].removesuffix(" if gaps else None")}
            ),
            r"ZeroDivisionError; it has no TPOT",
        ),
        (TIMES.format(**RIGHT_TIMES | {"ttft": "token_times[0]"}), r"TTFT is .*; sent at"),
        (
            TIMES.format(**RIGHT_TIMES | {"kept": "ttft <= max_ttft or tpot <= max_tpot"}),
            r"both promises must be kept",
        ),
        (
            TIMES.format(
                **RIGHT_TIMES | {"kept": "ttft < max_ttft and (tpot is None or tpot < max_tpot)"}
            ),
            r"a request that just keeps its promise counts",
        ),
        (TIMES.format(**RIGHT_TIMES | {"kept": "1"}), r"that is throughput"),
    ],
    "00.3": [
        (
            """
def incomplete(data):
    try:
        data.decode()
        return 0
    except UnicodeDecodeError as error:
        return len(data) - error.start
""",
            r"the stream stands still on broken bytes",
        ),
        (
            "def incomplete(data):\n    return int(bool(data) and data[-1] >= 0xC2)",
            r"the user sees � instead of a character|the rest of it shows as �",
        ),
        (
            UTF8.format(**RIGHT_UTF8 | {"stray": "min(3, len(data))"}),
            r"though the last character is complete",
        ),
        (
            UTF8.format(**RIGHT_UTF8 | {"held": "back if length > 1 else 0"}),
            r"every one beyond ASCII comes a token late",
        ),
        (
            UTF8.format(
                **RIGHT_UTF8 | {"length": LENGTH.replace("4 if 0xF0 <= byte <= 0xF4 else ", "")}
            ),
            r"nothing held back; the user sees �",
        ),
        (
            UTF8.format(**RIGHT_UTF8 | {"length": LENGTH.replace("0xC2", "0xC0")}),
            r"stands still on broken bytes",
        ),
        (
            """
def incomplete(data):
    text = data.decode(errors="replace")
    return 1 if text.endswith("\\ufffd") else 0
""",
            r"comes a token late|the rest of it shows as �",
        ),
    ],
    "00.4": [
        (
            SCANNER.format(**RIGHT_SCANNER | {"where": "piece", "text": "piece", "starts": "()"}),
            r"it lies across two pieces|what is sent cannot be taken back",
        ),
        (
            SCANNER.format(**RIGHT_SCANNER | {"starts": "[max(len(s) for s in self.stop) - 1]"}),
            r"the stream stutters",
        ),
        (
            SCANNER.format(**RIGHT_SCANNER | {"end": "text.find(s)"}).replace(
                "end, n = min(found)", "start, n = min(found); end = start + len(self.stop[n])"
            ),
            r"is complete first",
        ),
        (
            SCANNER.format(**RIGHT_SCANNER | {"cut": "text[:end - len(self.stop[n])]"}),
            r"include=True",
        ),
        (SCANNER.format(**RIGHT_SCANNER | {"finish": 'return ""'}), r"the end of the text is lost"),
        (
            SCANNER.format(
                **RIGHT_SCANNER
                | {"starts": "(k for s in self.stop for k in [len(s) - 1] if text.endswith(s[:k]))"}
            ),
            r"what is sent cannot be taken back|may yet become a stop string",
        ),
        (
            SCANNER.format(**RIGHT_SCANNER).replace(
                'if self.stopped_by is not None:\n            return ""', "pass"
            ),
            r"what is sent cannot be taken back|is complete first",
        ),
    ],
    "00.5": [
        (
            FIELDS.format(**RIGHT_FIELDS | {"outside": "value < low or value > high"}),
            r"nan.* is let in, not 'temperature': NaN is neither",
        ),
        (
            FIELDS.format(**RIGHT_FIELDS | {"wrong_type": "not isinstance(value, types)"}),
            r"True is an int to Python",
        ),
        (
            FIELDS.format(**RIGHT_FIELDS | {"outside": "not low < value < high"}),
            r"borders are allowed",
        ),
        (
            FIELDS.format(**RIGHT_FIELDS | {"wrong_type": "isinstance(value, bool)"}),
            r"the client sees 'internal server error'|it has a fraction",
        ),
        (FIELDS.format(**RIGHT_FIELDS | {"number": "float"}), r"whole numbers are numbers"),
        (FIELDS.format(**RIGHT_FIELDS | {"unknown": "continue"}), r"no such field"),
        (
            FIELDS.format(**RIGHT_FIELDS | {"outside": "not low <= float(value) <= high"}),
            r"OverflowError",
        ),
    ],
}
