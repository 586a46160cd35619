"""The thread in which what takes long to import is made ready, while the text is shown without it."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache


@lru_cache(maxsize=1)
def thread() -> ThreadPoolExecutor:
    """Return the thread: the lexer of Python takes 25 ms, some others and the formulas 100."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="markdown")
