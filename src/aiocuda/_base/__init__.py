"""Base: types, checks, log events and other modules that every package may use. They know no stream, device or queue.

See its README.md in the repository. A module in here imports nothing of aiocuda but `errors` and its neighbours.
"""
