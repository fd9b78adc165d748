"""The side of the engine that touches tensors: it keeps each request's row and runs the steps.

A worker is told by a `SchedulerOutput` what to compute and answers with a `ModelRunnerOutput`. It
must not know text, queues or policies, and it keeps no reference to the scheduler's objects.
"""
