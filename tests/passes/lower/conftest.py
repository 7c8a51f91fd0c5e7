"""The fixture of tests that compile for a GPU that is not there."""

from absent_gpu import library  # noqa: F401
