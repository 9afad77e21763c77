"""Worker processes that get jobs as JSON lines on standard input and answer with JSON lines on standard output.

`pool` is the side of the parent, `serving` the side of a worker. This room imports nothing of selfless, and any room may import it.
"""

from selfless.workers.pool import Pool, WorkerDied
from selfless.workers.serving import Send, serve

__all__ = ["Pool", "Send", "WorkerDied", "serve"]
