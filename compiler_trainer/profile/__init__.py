"""The time of a step, measured and predicted, and the options that would shorten it."""
