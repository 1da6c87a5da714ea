"""When a job has printed nothing for so long that launch.sh shows where its ranks are."""

HOW_TO_END = "to end it, press Ctrl-C, or start it with --timeout SECONDS"


class Silence:
    """Which silences are to be shown: each one once, and only if it is twice as long as the last that was shown.

    So a job that prints every ten minutes is shown once, and not every ten minutes.
    """

    def __init__(self, seconds):
        """seconds: of the first silence that is shown; 0: none is."""
        self.seconds = seconds or float("inf")
        self.shown = None  # when the silence began that was shown last

    def to_show(self, printed, now):
        """The seconds of silence to speak of, None if there is nothing to show.

        printed: when a rank has printed last.
        """
        if printed == self.shown or now - printed < self.seconds:
            return None
        seconds, self.shown = self.seconds, printed
        self.seconds *= 2
        return seconds
