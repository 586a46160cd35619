"""Conversations as tokens: turns, the next prompt, think policies, prewarming, why rows were reused or not."""
