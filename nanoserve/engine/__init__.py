"""The engine: from a request at the door to tokens coming back, one step after another.

`core` runs scheduler and executor; `client` reaches a core in this process or another; the input
and output processors stand on the caller's side and turn text into tokens and back. This package
must not know HTTP.
"""
