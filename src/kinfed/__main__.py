"""`python -m kinfed` is the same as `kinfed`."""

import sys

from .cli import main

sys.exit(main())
