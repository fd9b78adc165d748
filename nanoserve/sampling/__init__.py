"""Choosing tokens: random numbers that depend on nothing but their key, the masks, the draw.

It is given logits and, for each row, what the caller asked for. It must not know requests,
schedulers or how the logits were made.
"""
