"""`python -m tools.parity`."""

import sys

from tools.parity.command import main

sys.exit(main())
