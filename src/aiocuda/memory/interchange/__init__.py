"""Memory and streams that aiocuda shares with other libraries. See its README.md in the repository."""
