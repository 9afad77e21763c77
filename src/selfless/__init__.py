"""selfless: continual learning that leaves room for the tasks to come."""

__version__ = "0.1.0"
