"""`python -m tests.nightly.parity`."""

import sys

from tests.nightly.parity.command import main

sys.exit(main())
