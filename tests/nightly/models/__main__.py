"""`python -m tests.nightly.models`."""

import sys

from tests.nightly.models.command import main

sys.exit(main())
