"""``python -m tests.gpu``: run all GPU tests, in several pytest processes, and show which of them fail."""
