"""Processes that this process starts: start and end, messages over socket pairs, exceptions, the main guard.

A process of a loader or of a cluster imports this package first: it needs only the standard library and NumPy. See
its README.md in the repository.
"""
