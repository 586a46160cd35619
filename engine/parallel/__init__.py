"""Tensor parallelism over several processes: each rank holds a part of every layer, and all compute a step together.

Rank 0 is the engine: it schedules, samples and keeps the conversations. The other ranks carry out its messages.
"""
