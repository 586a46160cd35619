"""The keys of a selected message."""

MESSAGE_KEYS = {
    "up": ("select", "prev"),
    "k": ("select", "prev"),
    "down": ("select", "next"),
    "j": ("select", "next"),
    "c": ("copy", ""),
    "e": ("edit", ""),
    "r": ("retry", ""),
    "left_square_bracket": ("branch", "prev"),
    "left": ("branch", "prev"),
    "right_square_bracket": ("branch", "next"),
    "right": ("branch", "next"),
    "left_curly_bracket": ("select", "prev"),
    "right_curly_bracket": ("select", "next"),
    "t": ("expand", ""),
    "enter": ("expand", ""),
    "space": ("expand", ""),
}
"""By key, the command to run and its argument."""
CODE_KEYS = {"y": "copy", "s": "save", "x": "run", "z": "view"}
"""By key, what is done with a code block, or JSON, of the selected answer."""
EDGE_KEYS = {"g": -1, "G": 1}
"""Keys that go to the first line (-1) or to the last (1)."""
