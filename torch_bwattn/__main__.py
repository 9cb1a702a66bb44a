"""``python -m torch_bwattn``: see :mod:`torch_bwattn.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
