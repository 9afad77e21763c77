"""Worker processes that read jobs as JSON lines from standard input and answer with JSON lines on standard output.

`pool` is the code of the parent, `serving` the code of a worker. `mailbox` is where workers of a Ray cluster leave messages.
Imports nothing. Imported by bench, data and runner.
"""

from selfless.workers.pool import Pool, WorkerDied
from selfless.workers.serving import Send, serve

__all__ = ["Pool", "Send", "WorkerDied", "serve"]
