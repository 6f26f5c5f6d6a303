"""``python -m minisgl_cli``."""

import sys

from minisgl_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
