"""Which calls of flow.comm no other rank answered, from the numbers of calls that each rank reports at its end."""

import itertools
from collections import Counter

PAIRS = {"send": "recv"}  # each send needs a recv on the other rank; all other functions are called by every rank


def lines(calls):
    """Yield a line of text for each call that some ranks made more often than others.

    calls: {rank: [[function, other rank of send and recv, "file.py:line", number of calls], ...]}
    """
    for function in sorted({call[0] for rank in calls for call in calls[rank]} - {*PAIRS, *PAIRS.values()}):
        of_ranks = {rank: counted(calls[rank], function) for rank in calls}
        if len({sum(counts.values()) for counts in of_ranks.values()}) > 1:
            for place in sorted({place for counts in of_ranks.values() for place in counts}):
                times = {rank: counts[place] for rank, counts in of_ranks.items()}
                if len(set(times.values())) > 1:
                    yield f"flow.comm.{function} at {place} was called {by_ranks(times)}"
    for send, receive in PAIRS.items():
        for sender, receiver in itertools.product(calls, calls):
            sent = counted(calls[sender], send, receiver)
            received = counted(calls[receiver], receive, sender)
            if sum(sent.values()) != sum(received.values()):
                called = f"flow.comm.{send} to rank {receiver} was called {where(sent)} by rank {sender}"
                yield f"{called}; flow.comm.{receive} from rank {sender} {where(received)} by rank {receiver}"


def counted(calls, function, other=None):
    """{"file.py:line": how often a rank called a function there}. other: the other rank of send or recv."""
    counts = Counter()
    for name, with_rank, place, times in calls:
        if (name, with_rank) == (function, other):
            counts[place] += times
    return counts


def where(counts):
    """Such as "2 times at train.py:7"."""
    return times_of(sum(counts.values())) + (f" at {', '.join(sorted(counts))}" if counts else "")


def by_ranks(times):
    """Such as "2 times by ranks 0, 1; 1 time by rank 2"."""
    parts = []
    for number in sorted(set(times.values()), reverse=True):
        ranks = [str(rank) for rank in times if times[rank] == number]
        parts.append(f"{times_of(number)} by rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}")
    return "; ".join(parts)


def times_of(number):
    return f"{number} time" if number == 1 else f"{number} times"
