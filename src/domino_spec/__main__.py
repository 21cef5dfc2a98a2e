"""`python -m domino_spec`: the command line where the `domino` script is not on the path."""

from domino_spec.cli.main import main

if __name__ == "__main__":
    main()
