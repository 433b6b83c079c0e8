"""Processes that this process starts: messages over socket pairs, exceptions of other processes, the main guard.

A process of a loader or of a cluster imports this package first: it needs only the standard library and NumPy. See
`README.md` in this directory.
"""
