"""The command line: `nanoserve serve`, `chat`, `generate` and `bench`.

Parsing must stay instant, so nothing here imports torch, transformers or the server before a
command has been understood. This package must not know anything that the commands do themselves.
"""
