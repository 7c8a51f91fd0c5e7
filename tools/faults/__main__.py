"""`python -m tools.faults`."""

import sys

from tools.faults.command import main

sys.exit(main())
