"""Messages on their way from the nodes of a Ray cluster to the program that started the study.

Its process imports this file alone, not torch, so that it starts quickly.
"""

from __future__ import annotations

from typing import Any

MOST = 10_000  # messages that are kept; progress may be lost, results never travel this way


class Mailbox:
    """A Ray actor: workers put messages of their jobs, the driver takes all of them."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, dict[str, Any]]] = []

    def put(self, job: int, message: dict[str, Any]) -> None:
        """Keep the message of a job."""
        self.messages.append((job, message))
        del self.messages[:-MOST]

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (job, message) in the order of their arrival, and forget them."""
        taken, self.messages = self.messages, []
        return taken
