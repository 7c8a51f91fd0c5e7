"""The table, plots and files of a sweep, made again from its points: `python -m tools.sweep DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.sweep.render import render


def main() -> None:
    """Render the sweep in a folder; exits with 2 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the run.dir of a multirun")
    try:
        render(parser.parse_args().folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
