"""Every setting of the engine, as plain data: one dataclass a section, no torch, no behaviour.

A section checks its own values when it is made; `EngineConfig` checks them against each other.
This package must not know how any setting is carried out.
"""
