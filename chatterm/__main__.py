"""`python -m chatterm`."""

from chatterm.cli.main import main

if __name__ == "__main__":
    main()
