"""The tools that come with chatterm. Each plans a call without doing anything, and does it once somebody agreed."""
