"""The error of whoever types a command."""


class UsageError(BaseException):
    """One line that says why something cannot run, and what to type instead.

    Not an Exception: a script that is recorded must not catch it with `except Exception`.
    """
