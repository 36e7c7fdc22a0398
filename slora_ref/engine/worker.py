"""A shard that start_processes has started: `python -m slora_ref.engine.worker FD INDEX SHARDS`."""

from __future__ import annotations

import contextlib
import signal
import sys

from slora_ref.engine.follower import follow
from slora_ref.errors import ShardLost
from slora_ref.tp.processes import started_process


def main(words: list[str]) -> int:
    """Follows shard 0 to the end. Ctrl-C is shard 0's business: it reaches all processes of a terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ShardLost):  # shard 0 knows, or is gone
        follow(started_process(words))
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
