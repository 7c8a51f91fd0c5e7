"""Where a step's time goes, measured beside predicted, and what to change."""
