"""`python -m nanobook` is the command `nanobook`."""

import sys

from nanobook.cli import main

sys.exit(main())
