"""The KV cache as blocks: what a block is, who holds it, and which sequence it belongs to.

`spec` says what a layer caches, `block` and `block_pool` hand fixed-size blocks out and take them
back, `prefix_index` is the seam where equal prefixes are found, and `manager` keeps one block table
a request. This package deals in numbers only: it must not know tensors, devices, or what a step is.
"""
