"""The parts a transformer is made of, each written once and shared by every model.

A layer is told its sizes and its `ParallelGroup` when it is made and everything about the step
when it is called. It must not know requests, block pools, or which model it is part of.
"""
