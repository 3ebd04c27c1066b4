"""`python -m headsmith` is the `headsmith` command."""

from headsmith.cli import main

if __name__ == "__main__":
    main()
