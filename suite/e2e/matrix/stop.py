"""A signal that asks for the end. Only recorded: nothing is ever cut off in the middle of a write."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: its terminal went away


class Stop:
    """Whether the end was asked for."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals; outside the main thread there are none to take."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores
        before = {number: signal.signal(number, self.ask) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
