"""Signals that end a run behind its present step, with its state saved."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NOTICE = b"\neagle_train: the run ends behind this step, with its state saved (once more ends it at once)\n"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A launcher passes on what a terminal or a scheduler has sent to its ranks already.
REPEAT_SECONDS = 1.0
# What Python gets to end by itself when it was asked a second time.
GRACE_SECONDS = 1.0


@dataclass(slots=True)
class StopRequest:
    """The signal that asks for the end; 0: none yet. since: its time, in seconds of `time.monotonic`."""

    signum: int = 0
    since: float | None = None

    def is_urgent(self) -> bool:
        """Whether a signal that comes now is a second one."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        return now - self.since > REPEAT_SECONDS


@contextmanager
def stop_on_signals(*, says_so: bool) -> Iterator[StopRequest]:
    """Within, the first SIGTERM (of job schedulers) or SIGINT (Ctrl-C) is noted instead of obeyed; a second
    one, more than REPEAT_SECONDS later, is obeyed as before, and ends the process within GRACE_SECONDS even
    where it waits for a rank that hangs. Nothing is changed outside the main thread, which alone may handle
    signals, nor for a signal that the process ignores.
    """
    request = StopRequest()
    previous = {signum: signal.getsignal(signum) for signum in SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    noted = [s for s, handler in previous.items() if is_main and handler not in (signal.SIG_IGN, None)]
    if not noted:
        yield request
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if request.is_urgent():
            signal.signal(signum, previous[signal.Signals(signum)])
            signal.raise_signal(signum)
        request.signum = request.signum or signum

    # A handler waits for the main thread to be in Python; the wake-up pipe tells another thread at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    is_over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(reader, request, is_over, says_so), daemon=True)
    watcher.start()
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        for signum in noted:
            signal.signal(signum, note)
        yield request
    finally:
        for signum in noted:
            signal.signal(signum, previous[signum])
        is_over.set()
        signal.set_wakeup_fd(previous_writer)
        os.write(writer, b"\0")
        watcher.join()
        os.close(reader)
        os.close(writer)


def _watch(reader: int, request: StopRequest, is_over: threading.Event, says_so: bool) -> None:
    """Tell of the first signal, and end the process behind the second one if nothing else does. A zero ends
    the watch.
    """
    is_first = True
    while signum := os.read(reader, 1)[0]:
        if signum not in SIGNALS:
            continue
        if is_first and says_so:
            os.write(2, NOTICE)
        is_first = False
        if request.is_urgent() and not is_over.wait(GRACE_SECONDS):
            os._exit(128 + signum)
