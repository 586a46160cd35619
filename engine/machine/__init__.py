"""The machine: its devices, the bandwidth of its memory, the speed to expect, and the report of `doctor`."""
