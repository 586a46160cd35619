"""The tools that come with chatterm. Each plans a call without side effects and runs it once a person has agreed."""
