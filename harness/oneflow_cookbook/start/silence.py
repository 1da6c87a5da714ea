"""Decides when a job has been silent for so long that launch.sh shows where its ranks are."""

import shutil

HOW_TO_END = "to end it, press Ctrl-C, or start it with --timeout SECONDS"


def lost_batch_in_words(rank, no_room):
    """The line about a rank that waits for what a worker could not send. no_room: whether /dev/shm was full."""
    text = f"a worker process of rank {rank} could not send a batch, see its traceback above; the rank waits for it"
    if no_room:
        size, _, free = shutil.disk_usage("/dev/shm")
        room = f"/dev/shm has {size / 2**20:.0f} MiB, {free / 2**20:.0f} of them free now"
        text += f". {room}: give a container more, such as --shm-size 2g, or load with num_workers=0"
    return text


class Silence:
    """Shows each silence once, and only if it is twice as long as the last that was shown.

    So a job that prints every ten minutes is shown once, not every ten minutes.
    """

    def __init__(self, seconds):
        """seconds: length of the first silence that is shown; 0: never show any."""
        self.seconds = seconds or float("inf")
        self.shown = None  # the start of the silence that was shown last

    def to_show(self, printed, now):
        """The seconds of silence to report, None if there is nothing to report.

        printed: when a rank last printed; now: both by time.monotonic().
        """
        if printed == self.shown or now - printed < self.seconds:
            return None
        seconds, self.shown = self.seconds, printed
        self.seconds *= 2
        return seconds
