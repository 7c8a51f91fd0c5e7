"""Commands on an existing run: resume it, evaluate it, sample from it, export its weights."""
