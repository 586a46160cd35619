"""`python -m chatterm`, and the console script."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from chatterm.cli import main as cli
    except KeyboardInterrupt:  # importing takes a tenth of a second
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
