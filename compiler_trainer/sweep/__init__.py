"""A multirun: each point runs once and leaves a row (`point`, `row`); the rows become tables (`table`) and plots (`page`)."""
