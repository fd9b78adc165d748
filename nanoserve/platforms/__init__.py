"""The machines the engine runs on: what each can compute in, and how much memory it may take.

A platform decides device, type, attention backend and memory budget. It must not know models,
requests or the cache's layout.
"""
