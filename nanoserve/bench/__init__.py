"""Measuring: latency, beside a peer in the same run, with the oracle's verdict next to each figure.

Flags and JSON keys are vLLM's. This package must not be imported by the engine.
"""
