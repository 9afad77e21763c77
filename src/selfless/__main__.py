"""`python -m selfless`: the command line."""

from selfless.cli import main

main()
