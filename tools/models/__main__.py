"""`python -m tools.models`."""

import sys

from tools.models.command import main

sys.exit(main())
