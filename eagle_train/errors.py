"""The one exception for what a user can mend."""


class RankError(Exception):
    """Another rank died or stopped answering; the command line prints it as one line and ends with code 1."""


class InputError(ValueError):
    """Bad input: the message names the value, the limit and the remedy in one line.

    The command line prints it without a traceback and exits with code 2; every other exception is a bug.
    """
