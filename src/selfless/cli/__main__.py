"""`python -m selfless.cli`: the same as `python -m selfless`."""

from selfless.cli import main

main()
