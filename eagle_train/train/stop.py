"""Signals that end a run behind its present step, with its state saved."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NOTICE = b"\neagle_train: the run ends behind this step, with its state saved (Ctrl-C once more: at once)\n"


@dataclass(slots=True)
class StopRequest:
    """The signal that asks for the end; 0: none yet."""

    signum: int = 0


@contextmanager
def stop_on_signals(*, says_so: bool) -> Iterator[StopRequest]:
    """Within, SIGTERM (of job schedulers) and the first SIGINT (Ctrl-C) are noted instead of obeyed; the
    second SIGINT is obeyed as before. Nothing is changed outside the main thread, which alone may handle
    signals, nor for a signal that the process ignores.
    """
    request = StopRequest()
    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    is_main = threading.current_thread() is threading.main_thread()
    noted = [s for s, handler in previous.items() if is_main and handler not in (signal.SIG_IGN, None)]

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        if signum == signal.SIGINT:
            signal.signal(signum, previous[signal.SIGINT])
        if says_so:
            os.write(2, NOTICE)  # print may be what the signal came into

    try:
        for signum in noted:
            signal.signal(signum, note)
        yield request
    finally:
        for signum in noted:
            signal.signal(signum, previous[signum])
