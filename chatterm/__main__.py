"""`python -m chatterm`."""

from chatterm.cli import main

if __name__ == "__main__":
    main()
