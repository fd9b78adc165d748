"""The check of chapter 05's code: the learner's prefix index, held against what blocks really hold.

Random requests share beginnings, grow and end in a pool where blocks change hands all the time. We
write down what every block was filled with, and know without any hash what a lookup must find.
"""

import random

from nanobook.grading import Wrong

from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_index import PREFIX_INDEXES
from nanoserve.kvcache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from nanoserve.request import Request
from nanoserve.sampling_params import SamplingParams

SIZE = 4


def check() -> None:
    """Raise Wrong if a lookup finds too much, too little, or somebody else's."""
    for seed in range(6):
        _Workload(random.Random(seed)).run(120)


class _Workload:
    """Requests come, grow and go; for every block we keep what was written into it.

    Attributes:
        contents: block id -> (the row up to the block's end, its salt), of blocks that have been
            named and not handed out since.
    """

    def __init__(self, rng: random.Random) -> None:
        spec = FullAttentionSpec(SIZE, num_kv_heads=1, head_dim=1, dtype_bytes=4)
        config = KVCacheConfig(rng.choice((14, 24)), (KVCacheGroup((0,), spec),))
        self.manager = KVCacheManager(config, PREFIX_INDEXES.load("hash"))
        self.rng = rng
        self.rows: list[list[int]] = [[]]
        self.contents: dict[int, tuple[tuple[int, ...], str | None]] = {}
        self.live: list[tuple[Request, str | None]] = []

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            if self.live and self.rng.random() < 0.4:
                request, salt = self.rng.choice(self.live)
                if self.rng.random() < 0.5:
                    self._compute(request, salt, [self.rng.randrange(2) for _ in range(3)])
                else:
                    self.live.remove((request, salt))
                    self.manager.free(request)
            else:
                self._admit(f"r{number}")
        for request, _ in self.live:
            self.manager.free(request)
        if self.manager.num_free_blocks != self.manager.block_pool.num_usable_blocks:
            raise Wrong("all requests have ended, and blocks are still in use")

    def _admit(self, name: str) -> None:
        old = self.rng.choice(self.rows)
        row = old[: self.rng.randrange(len(old) + 1)]
        row = row + [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
        salt = self.rng.choice((None, None, "red", "blue"))
        request = Request(name, row, SamplingParams(), cache_salt=salt)
        hits, num_found = self.manager.get_computed_blocks(request)
        self._judge(row, salt, [block.block_id for block in hits[0]], num_found)
        new = self.manager.allocate_slots(request, len(row) - num_found, num_found, hits)
        if new is None:
            return
        request.num_computed_tokens = num_found
        self.rows.append(request.token_ids)
        self.live.append((request, salt))
        self._filled(request, salt, [block.block_id for block in new[0]])

    def _compute(self, request: Request, salt: str | None, tokens: list[int]) -> None:
        new = self.manager.allocate_slots(request, len(tokens))
        if new is None:
            return
        request.token_ids += tokens
        self._filled(request, salt, [block.block_id for block in new[0]])

    def _filled(self, request: Request, salt: str | None, new: list[int]) -> None:
        for block in new:
            self.contents.pop(block, None)
        request.num_computed_tokens = request.num_tokens
        self.manager.cache_blocks(request, request.num_tokens)
        [table] = self.manager.get_block_ids(request.request_id)
        for i in range(request.num_tokens // SIZE):
            self.contents[table[i]] = (tuple(request.token_ids[: (i + 1) * SIZE]), salt)

    def _judge(self, row: list[int], salt: str | None, found: list[int], num_found: int) -> None:
        where = f"looking up {row} with salt {salt!r}"
        if num_found != len(found) * SIZE:
            raise Wrong(f"{len(found)} blocks of {SIZE} and {num_found} tokens are found ({where})")
        if num_found >= len(row):
            raise Wrong(f"all tokens are found, and nothing is left to compute ({where})")
        for i, block in enumerate(found):
            tokens, owner = self.contents.get(block, ((), None))
            if tokens != tuple(row[: (i + 1) * SIZE]):
                raise Wrong(f"block {block} is found, which holds the end of {tokens} ({where})")
            if owner != salt:
                raise Wrong(f"a block of salt {owner!r} is found ({where})")
        known = set(self.contents.values())
        right = 0
        while right < len(row) - SIZE and (tuple(row[: right + SIZE]), salt) in known:
            right += SIZE
        if num_found != right:
            raise Wrong(f"{num_found} tokens are found where {right} could be ({where})")
