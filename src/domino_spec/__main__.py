"""`python -m domino_spec` is the `domino` command."""

from domino_spec.cli.main import main

main()
