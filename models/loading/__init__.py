"""From files on disk to a network in memory: the plan, and how it is carried out."""
