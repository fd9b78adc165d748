"""The model classes, the registry that finds them by name, and the loader that fills them.

A model turns a `ForwardBatch` into hidden states and hidden states into logits. It must not know
requests, sampling, or where its weights came from.
"""
