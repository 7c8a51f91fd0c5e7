"""`python -m tools.odd`."""

import sys

from tools.odd.command import main

sys.exit(main())
