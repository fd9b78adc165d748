class StopScanner:
    def __init__(self, stop, include=False):
        self.stop, self.include = stop, include
        self.stopped_by, self.held = None, ""

    def push(self, piece):
        if self.stopped_by is not None:
            return ""
        text = self.held + piece
        found = [(text.find(s) + len(s), n) for n, s in enumerate(self.stop) if s in text]
        if found:
            end, n = min(found)
            self.stopped_by, self.held = self.stop[n], ""
            return text[:end] if self.include else text[: end - len(self.stop[n])]
        starts = (k for s in self.stop for k in range(1, len(s)) if text.endswith(s[:k]))
        safe = len(text) - max(starts, default=0)
        self.held = text[safe:]
        return text[:safe]

    def finish(self):
        held, self.held = self.held, ""
        return held
