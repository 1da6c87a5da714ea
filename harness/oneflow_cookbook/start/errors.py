"""UsageError: what the user typed cannot run."""


class UsageError(BaseException):
    """Its text is one line: why the command cannot run, and what to type instead.

    Not an Exception, so that `except Exception` in a script under `show` does not catch it.
    """
