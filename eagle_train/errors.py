"""How a command ends other than well: what a user can mend, a lost rank, a signal."""


class RankError(Exception):
    """Another rank died or stopped answering; the command line prints it as one line and ends with code 1."""


class Stopped(Exception):
    """A signal ended a run, whose state is saved. code: the exit code, 128 and the signal's number."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class InputError(ValueError):
    """Bad input: the message names the value, the limit and the remedy in one line.

    The command line prints it without a traceback and exits with code 2; every other exception is a bug.
    """
