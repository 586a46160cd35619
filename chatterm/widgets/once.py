"""A callback after a while."""

from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable

from textual.message_pump import MessagePump


def call_once(pump: MessagePump, delay: float, callback: Callable[[], object]) -> TimerHandle:
    """Call back in `delay` seconds, in a message of its own to `pump`; not if that is closed by then.

    Textual's `set_timer` never calls back if the process is held up for `delay` just when its timer begins.
    """
    return get_running_loop().call_later(delay, pump.call_later, callback)
