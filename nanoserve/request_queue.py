"""Requests that wait, in the order in which they will be admitted.

Ten thousand of them must cost a step nothing: looking at the head, taking it, putting it back and
dropping a request from the middle, when its client has left, are all cheap. A queue must not know
why a request waits or whether it fits.
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from nanoserve.request import Request


class RequestQueue(ABC):
    """A queue of waiting requests under one policy."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Put a request in its place, behind those that came before it."""

    @abstractmethod
    def peek(self) -> Request:
        """The request to be served next. Raises IndexError when there is none."""

    @abstractmethod
    def pop(self) -> Request:
        """Take out the request to be served next. Raises IndexError when there is none."""

    @abstractmethod
    def put_back(self, requests: Sequence[Request]) -> None:
        """Return requests to the head, in the order given, ahead of all that wait."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it is not here."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """The requests in the order in which they will be served."""


class FCFSRequestQueue(RequestQueue):
    """First come, first served; what is put back goes first. Every operation is O(1)."""

    def __init__(self) -> None:
        # A linked list with a map into it, which is what removing from the middle needs.
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Put a request at the end."""
        self._requests[request.request_id] = request

    def peek(self) -> Request:
        """The first request. Raises IndexError when there is none."""
        for request in self._requests.values():
            return request
        raise IndexError("peek at an empty queue")

    def pop(self) -> Request:
        """Take out the first request. Raises IndexError when there is none."""
        if not self._requests:
            raise IndexError("pop from an empty queue")
        return self._requests.popitem(last=False)[1]

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return requests to the head, in the order given."""
        for request in reversed(requests):
            self._requests[request.request_id] = request
            self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it is not here."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))


class PriorityRequestQueue(RequestQueue):
    """Lower priority value first, ties by arrival; a request put back finds its place again.

    A heap. A removed request's entry stays until it surfaces, or until such entries are the greater
    part of the heap and are swept out, so that every operation is O(log n) on average.
    """

    def __init__(self) -> None:
        # The counter keeps two entries from ever being compared by their requests.
        self._heap: list[tuple[tuple[int, float, int], int, Request]] = []
        self._counter = itertools.count()
        self._waiting: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (request.sort_key, next(self._counter), request))

    def peek(self) -> Request:
        """The request of the lowest priority value. Raises IndexError when there is none."""
        while self._heap[0][2].request_id not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        """Take out that request. Raises IndexError when there is none."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return requests to their places, which their priority and arrival give."""
        for request in requests:
            self.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it is not here."""
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[2].request_id in self._waiting]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._waiting.values(), key=lambda request: request.sort_key))


def make_request_queue(policy: str) -> RequestQueue:
    """The queue of a scheduling policy: "fcfs" or "priority"."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
