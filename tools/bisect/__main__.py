"""`python -m tools.bisect`."""

import sys

from tools.bisect.command import main

sys.exit(main())
