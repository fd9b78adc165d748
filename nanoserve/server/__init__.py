"""The HTTP server: the OpenAI API, metrics and health, in front of one `AsyncLLM`.

A request comes in as JSON, is checked, becomes sampling parameters and token ids, and the engine's
outputs go back as the `openai` package's own response objects or as a stream of them. This package
must not know how the engine schedules or computes; it only sees `AsyncLLM`.
"""
