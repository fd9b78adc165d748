"""Attention backends: each writes new keys and values to a cache and reads through it.

They follow `nanoserve.forward.AttentionBackend` and are found through its registry. A backend is
told where each row's past lies; it must not know who laid it out, or which model is asking.
"""
