"""One model in several processes: each rank has a part of every layer, and all compute the same step at once.

Rank 0 is the engine: it schedules, samples and keeps the conversations. The others follow what it tells them.
"""
