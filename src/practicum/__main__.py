"""`python -m practicum` is the command line."""

from practicum.cli import main

if __name__ == "__main__":
    main()
