"""This machine: its devices, its memory's bandwidth, the speed to expect, what `doctor` tells."""
