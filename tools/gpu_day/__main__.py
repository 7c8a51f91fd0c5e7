"""`python -m tools.gpu_day`."""

import sys

from tools.gpu_day.command import main

sys.exit(main())
