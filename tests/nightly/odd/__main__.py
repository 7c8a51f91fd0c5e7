"""`python -m tests.nightly.odd`."""

import sys

from tests.nightly.odd.command import main

sys.exit(main())
