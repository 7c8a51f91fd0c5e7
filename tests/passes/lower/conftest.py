"""The fixture for tests that compile for a GPU without one."""

from absent_gpu import library  # noqa: F401
