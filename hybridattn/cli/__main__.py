"""``python -m hybridattn.cli``."""

import sys

from hybridattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
